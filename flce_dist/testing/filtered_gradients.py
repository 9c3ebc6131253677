"""The gradients that ``filter_eps`` defines, in dense fp64 matrices: the oracle of their tests.

They differ from exact gradients by design, so tests compare with this definition and measure the
distance from exact gradients apart. docs/filtered_gradients.md explains it.

T = tokens, V = vocabulary rows below ``vocab_size``, H = hidden size. A tile is 128 tokens by 256
rows, counted from the first row of each rank's shard. Everything is fp64, on the inputs' device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TILE_T, TILE_V = 128, 256
SAMPLE = 128  # tokens, at most, from which a tile's profile is taken
_MARGIN = 1e-5  # relative; fp32 may round a probability nearer to eps to its other side


class FilteredGradients(NamedTuple):
    """Gradients of the whole operands in fp64, and what they approximate."""

    dhidden: Tensor  # [T, H]
    dweight: Tensor  # of weight's shape
    dbias: Tensor | None
    kept: Tensor  # [blocks, tiles] bool; its mean is the call's kept_share
    rank_one_mass: Tensor  # scalar, as the call returns it


def filtered_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    filter_eps: float,
    dloss: Tensor | float = 1.0,
    bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    vocab_size: int | None = None,
    shard_starts: Sequence[int] = (0,),
    drops: bool = False,
) -> FilteredGradients:
    """Return the gradients that ``linear_cross_entropy(..., filter_eps=...)`` approximates.

    The op's results differ from them by rounding alone. Materialises several [T, V] in fp64.

    Args:
        hidden, weight, labels, bias, token_weight: whole tensors, of all ranks; hidden is [T, H],
            under sequence parallelism in the order in which it is gathered.
        filter_eps: no tile's largest probability may be nearer to it than 1e-5, relative.
        dloss: the upstream gradient, a scalar, or [T] with reduction="none".
        shard_starts: the first row of each rank's shard, in rising order; shards without rows are
            left out.
        drops: leave out the tiles that are not kept, as Cut Cross-Entropy does, to compare.

    Raises:
        ValueError: a probability is so near to ``filter_eps`` that rounding may decide.
    """
    V = len(weight) if vocab_size is None else vocab_size
    counted = (labels != ignore_index)[:, None]
    hidden = hidden.double().where(counted, 0.0)
    z = logit_scale * hidden @ weight[:V].double().T
    if bias is not None:
        z = z + bias[:V].double()
    is_label = (torch.arange(V, device=labels.device) == labels[:, None]) & counted
    p, kept, rank_one_mass = _probabilities(z, is_label, counted, filter_eps, shard_starts, drops)
    dz = _dlogits(
        p, z, is_label, counted, dloss=dloss, reduction=reduction,
        label_smoothing=label_smoothing, z_loss_weight=z_loss_weight, token_weight=token_weight,
    )  # fmt: skip
    rest = len(weight) - V
    dweight = logit_scale * dz.T @ hidden
    return FilteredGradients(
        dhidden=logit_scale * dz @ weight[:V].double(),
        dweight=torch.cat((dweight, dweight.new_zeros(rest, dweight.shape[1]))),
        dbias=None if bias is None else torch.cat((dz.sum(0), dz.new_zeros(rest))),
        kept=kept,
        rank_one_mass=rank_one_mass,
    )


def _probabilities(
    z: Tensor, is_label: Tensor, counted: Tensor, filter_eps: float, shard_starts: Sequence[int],
    drops: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Replace the softmax of ``z`` by mass times profile, or 0, in tiles that are not kept.

    ``z`` and ``is_label`` are [T, V], ``counted`` [T, 1]. Returns p [T, V], whose rows of ignored
    tokens mean nothing, the kept tiles, and the mean mass of counted tokens in the others.
    """
    T, V = z.shape
    p = z.softmax(1)
    tiles = _tile_sizes(V, shard_starts)
    kept = _kept_tiles(p.where(counted, 0.0), is_label, tiles, filter_eps)
    exact = _spread(kept.repeat_interleave(TILE_T, 0)[:T], tiles)
    rest = p.where(counted & ~exact, 0.0)
    mass = torch.stack([x.sum(1) for x in rest.split(tiles, 1)], 1)
    p = p.where(exact, 0.0 if drops else _spread(mass, tiles) * _profile(z, rest, tiles))
    return p, kept, mass.sum() / counted.sum().clamp_min(1)


def _profile(z: Tensor, rest: Tensor, tiles: list[int]) -> Tensor:
    """Return [V]: how mass spreads inside each tile, by the sampled tokens' ``rest``.

    A tile in which they have none is shared equally by the rows that no bias of -inf bans.
    """
    q = rest[:: -(-len(z) // SAMPLE)].sum(0)
    q = q.where(_spread(_tile_sums(q, tiles) > 0, tiles), z.isfinite().any(0).to(q))
    return q / _spread(_tile_sums(q, tiles).clamp_min(1e-300), tiles)


def _kept_tiles(p: Tensor, is_label: Tensor, tiles: list[int], filter_eps: float) -> Tensor:
    """Return [blocks, tiles]: a tile is kept if it holds a label, or p of ``filter_eps`` or more.

    ``p`` is 0 and ``is_label`` False for ignored tokens.
    """
    largest = _tile_maxima(p.masked_fill(is_label, 0.0), tiles)
    if ((largest / filter_eps - 1).abs() <= _MARGIN).any():
        raise ValueError(
            f"no probability may be within {_MARGIN} of filter_eps = {filter_eps}, relative, since "
            "rounding may put it on either side; choose another filter_eps"
        )
    holds_label = _tile_maxima(is_label.to(p), tiles) > 0
    return (largest >= filter_eps) | holds_label


def _dlogits(
    p: Tensor, z: Tensor, is_label: Tensor, counted: Tensor, *, dloss: Tensor | float = 1.0,
    reduction: str = "mean", label_smoothing: float = 0.0, z_loss_weight: float = 0.0,
    token_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the logits ``z`` [T, V] if their probabilities were ``p``."""
    weights = counted.double()
    if token_weight is not None:
        weights = weights * token_weight[:, None].double()
    g = torch.as_tensor(dloss, device=z.device).double().reshape(-1, 1) * weights
    if reduction == "mean":
        g = g / weights.sum().where((weights != 0).any(), 1.0)
    at_label = (1 - label_smoothing) * is_label.double()
    lse = z.logsumexp(1, keepdim=True)
    return g * (p * (1 + 2 * z_loss_weight * lse) - at_label - label_smoothing / z.shape[1])


def _tile_sizes(V: int, shard_starts: Sequence[int]) -> list[int]:
    """Return the rows of each tile; the last tile of a shard may have fewer than 256."""
    ends = [min(end, V) for end in (*shard_starts[1:], V)]
    return [
        min(TILE_V, end - v)
        for start, end in zip(shard_starts, ends, strict=True)
        for v in range(start, end, TILE_V)
    ]


def _tile_sums(x: Tensor, tiles: list[int]) -> Tensor:
    """[V] to [tiles]."""
    return torch.stack([part.sum() for part in x.split(tiles)])


def _tile_maxima(x: Tensor, tiles: list[int]) -> Tensor:
    """[T, V] to [blocks, tiles]."""
    columns = torch.stack([part.amax(1) for part in x.split(tiles, 1)], 1)
    return torch.stack([block.amax(0) for block in columns.split(TILE_T)])


def _spread(x: Tensor, tiles: list[int]) -> Tensor:
    """[..., tiles] to [..., V]."""
    return x.repeat_interleave(torch.tensor(tiles, device=x.device), -1, output_size=sum(tiles))
