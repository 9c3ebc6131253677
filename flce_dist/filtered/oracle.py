"""The gradients that ``schedule`` of this package defines, in dense fp64 matrices: the oracle.

docs/filtered_gradients.md explains them. T = tokens, V = vocabulary rows below ``vocab_size``,
H = hidden size. A tile is 128 tokens by 256 rows, counted from the first row of each rank's shard.

The profiles are taken from a sample of the tokens whose loss has a gradient: not ignored, and
neither token_weight nor the upstream gradient 0. In the caller's order these n tokens are cut into
S = min(n, 128) runs, run i (0, 1, ...) beginning at the floor(i n / S)-th of them. Each run of L
tokens gives its floor(L f)-th, with ``f = (i + 1) * GOLDEN / 2**32 % 1``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TILE_T = 128
TILE_V = 256
SAMPLE = 128  # tokens, at most, from which a tile's profile is taken
GOLDEN = 0x9E3779B9  # of 2**32, the golden ratio
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
    eps: float,
    dloss: Tensor | float = 1.0,
    bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    vocab_size: int | None = None,
    shard_starts: Sequence[int] = (0,),
    drops: bool = False,
) -> FilteredGradients:
    """Return what ``linear_cross_entropy(..., schedule=schedule(eps))`` computes, but for rounding.

    Args:
        hidden, weight, labels, bias, token_weight, temperature: whole tensors, of all ranks;
            hidden is [T, H].
        eps: no tile's largest probability may be nearer to it than 1e-5, relative.
        dloss: the upstream gradient, a scalar, or [T] with reduction="none".
        shard_starts: the first row of each rank's shard, in rising order, if it has rows.
        drops: leave out the tiles that are not kept, to compare.

    Raises:
        ValueError: a probability is so near to ``eps`` that rounding may decide.

    Example::

        gradients = filtered.filtered_gradients(hidden, weight, labels, eps=2**-12)
    """
    V = len(weight) if vocab_size is None else vocab_size
    counted = (labels != ignore_index)[:, None]
    hidden = hidden.double().where(counted, 0.0)
    z = logit_scale * hidden @ weight[:V].double().T
    if bias is not None:
        z = z + bias[:V].double()
    temperature = torch.as_tensor(temperature, dtype=torch.float64, device=z.device).reshape(-1, 1)
    z = z / temperature.where(counted, 1.0)
    is_label = (torch.arange(V, device=labels.device) == labels[:, None]) & counted
    g = _token_gradients(counted, dloss, reduction, token_weight)
    p = z.softmax(1)
    tile = _tile_of_row(V, shard_starts, z.device)
    kept = _kept_tiles(p.where(counted, 0.0), is_label, tile, eps)
    exact = kept[:, tile].repeat_interleave(TILE_T, 0)[: len(labels)]
    approximated = p.where(counted & ~exact, 0.0)
    mass = _tile_sums(approximated, tile)
    profile = _profile(z, approximated[sampled_tokens(g[:, 0] != 0)], tile)
    p = p.where(exact, 0.0 if drops else mass[:, tile] * profile)
    at_label = (1 - label_smoothing) * is_label.double()
    lse = z.logsumexp(1, keepdim=True)
    dz = g * (p * (1 + 2 * z_loss_weight * lse) - at_label - label_smoothing / V)
    dz = dz / temperature.where(counted, 1.0)  # by the logits before temperature
    padding = len(weight) - V
    dweight = logit_scale * dz.T @ hidden
    return FilteredGradients(
        dhidden=logit_scale * dz @ weight[:V].double(),
        dweight=torch.cat((dweight, dweight.new_zeros(padding, dweight.shape[1]))),
        dbias=None if bias is None else torch.cat((dz.sum(0), dz.new_zeros(padding))),
        kept=kept,
        rank_one_mass=mass.sum() / counted.sum().clamp_min(1),
    )


def sampled_tokens(has_gradient: Tensor) -> list[int]:
    tokens = has_gradient.nonzero()[:, 0].tolist()
    n = len(tokens)
    S = min(n, SAMPLE)
    runs = [tokens[i * n // S : (i + 1) * n // S] for i in range(S)]
    return [run[len(run) * ((i + 1) * GOLDEN % 2**32) // 2**32] for i, run in enumerate(runs)]


def _profile(z: Tensor, of_sample: Tensor, tile: Tensor) -> Tensor:
    """Return [V]: how mass spreads inside each tile, by probabilities of sampled tokens.

    A tile in which they have none is shared equally by the rows that no bias of -inf bans.
    """
    q = of_sample.sum(0)
    q = q.where(_tile_sums(q, tile)[tile] > 0, z.isfinite().any(0).to(q))
    return q / _tile_sums(q, tile)[tile].clamp_min(1e-300)


def _kept_tiles(p: Tensor, is_label: Tensor, tile: Tensor, eps: float) -> Tensor:
    """Return [blocks, tiles]; ``p`` is 0 and ``is_label`` False for ignored tokens."""
    largest = _tile_maxima(p.masked_fill(is_label, 0.0), tile)
    if ((largest / eps - 1).abs() <= _MARGIN).any():
        raise ValueError(
            f"no probability may be within {_MARGIN} of eps = {eps}, relative, since "
            "rounding may put it on either side; choose another eps"
        )
    holds_label = _tile_maxima(is_label.to(p), tile) > 0
    return (largest >= eps) | holds_label


def _token_gradients(
    counted: Tensor, dloss: Tensor | float, reduction: str, token_weight: Tensor | None
) -> Tensor:
    """Return [T, 1]: the gradient that reaches each token's loss."""
    weights = counted.double()
    if token_weight is not None:
        weights = weights * token_weight[:, None].double()
    g = torch.as_tensor(dloss, device=counted.device).double().reshape(-1, 1) * weights
    if reduction == "mean":
        g = g / weights.sum().where((weights != 0).any(), 1.0)
    return g


def _tile_of_row(V: int, shard_starts: Sequence[int], device: torch.device) -> Tensor:
    """Return [V]: each row's tile; the last one of a shard may have fewer than 256 rows."""
    rows = torch.arange(V, device=device)
    starts = torch.tensor(list(shard_starts), device=device)
    shard = torch.searchsorted(starts, rows, right=True) - 1
    place = shard * V + (rows - starts[shard]) // TILE_V
    return place.unique_consecutive(return_inverse=True)[1]


def _tile_sums(x: Tensor, tile: Tensor) -> Tensor:
    """[..., V] to [..., tiles]."""
    return x.new_zeros(*x.shape[:-1], int(tile[-1]) + 1).index_add_(-1, tile, x)


def _tile_maxima(x: Tensor, tile: Tensor) -> Tensor:
    """[T, V], at least 0, to [blocks, tiles]."""
    maxima = x.new_zeros(len(x), int(tile[-1]) + 1).scatter_reduce_(1, tile.expand_as(x), x, "amax")
    return torch.stack([block.amax(0) for block in maxima.split(TILE_T)])
