"""Filtered gradients in plain PyTorch: the functions of ``gpu.py``, whose docstrings hold here.

D lies in a dense window of columns, 0 in the tiles that are not kept. A round is the next window,
so nothing is read on the host. T = tokens, V = vocabulary rows here, H = hidden size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist.kernels import gemm
from flce_dist.kernels.eager_logits import dlogits, windows, write_at_labels
from flce_dist.kernels.filtered.tiles import TILE_T, TILE_V, tile_grid
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import RowGradient
from flce_dist.kernels.token_loss_formulas import TokenStats, first_reference


def new_tile_stats(logits: ShardLogits) -> Tensor:
    _, tiles = tile_grid(logits.T, logits.V)
    return logits.hidden.new_empty(2, tiles, logits.T, dtype=logits.stats_dtype)


def write_tile_stats(logits: ShardLogits, reference: Tensor, tiles: Tensor) -> None:
    """Write the maxima and sums of exp(z - reference) in each tile, without the labels."""
    ignored, none = ~logits.counted, torch.full_like(reference, -torch.inf)
    reference = reference.masked_fill(ignored, torch.inf)
    for start, z in windows(logits, TILE_V):
        write_at_labels(z, logits, start, none)
        z = F.pad(z, (0, -z.shape[1] % TILE_V), value=-torch.inf).unflatten(1, (-1, TILE_V))
        here = slice(start // TILE_V, start // TILE_V + z.shape[1])
        tiles[0, here] = z.amax(2).masked_fill(ignored[:, None], -torch.inf).T
        tiles[1, here] = (z - reference[:, None, None]).exp().sum(2).T


def kept_tiles(
    logits: ShardLogits, tile_stats: Tensor, stats: TokenStats, eps: float
) -> tuple[Tensor, Tensor]:
    maxima, sums = tile_stats
    lse, counted = stats.lse, logits.counted
    blocks, J = tile_grid(logits.T, logits.V)
    mass = sums * (first_reference(stats.label_logit) - lse).exp()
    column = logits.labels - logits.vocab_start_index
    label_tile = (column // TILE_V).where(column < logits.V, -1)
    has_label = torch.arange(J, device=mass.device)[:, None] == label_tile
    reached = ((maxima - lse).exp() >= eps) | ~mass.isfinite() | has_label
    padded = F.pad(reached & counted, (0, -logits.T % TILE_T))
    kept = padded.view(J, blocks, TILE_T).any(2).T.contiguous()
    exact = _of_tokens(kept, logits.T).T | ~counted
    return kept, mass.masked_fill(exact, 0.0).to(logits.hidden.dtype)


def tile_profile(logits: ShardLogits, lse: Tensor, kept: Tensor, sample: Tensor) -> Tensor:
    tokens = sample.clamp_min(0)
    of_tiles = kept[tokens // TILE_T] | (sample < 0)[:, None]
    total = lse.new_empty(logits.V)
    for start, z in windows(logits.rows(tokens)):
        columns = torch.arange(start, start + z.shape[1], device=z.device)
        left_out = ~of_tiles[:, columns // TILE_V]
        total[columns] = (z - lse[tokens, None]).exp().where(left_out, 0.0).sum(0)
    return total


def rank_one(
    logits: ShardLogits, total: Tensor, mass: Tensor, scale: Tensor | None, *, with_means: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    even = torch.ones_like(total) if logits.bias is None else (logits.bias != -torch.inf).to(total)
    q = total.where(_spread(_tile_sums(total) > 0, logits.V), even)
    q = q / _spread(_tile_sums(q), logits.V).clamp_min(torch.finfo(q.dtype).tiny)
    means = None
    if with_means:
        tiles = zip(q.split(TILE_V), logits.weight.split(TILE_V), strict=True)
        means = torch.stack([part @ rows.to(q.dtype) for part, rows in tiles]).to(mass.dtype)
    return q, means, mass if scale is None else (mass * scale).to(mass.dtype)


@dataclass(frozen=True)
class TileLists:
    kept: Tensor
    columns: int  # of tiles of a round

    @property
    def rounds(self) -> int:
        return -(-self.kept.shape[1] // self.columns)

    def window(self, round: int, V: int) -> tuple[int, int]:
        """The first row of the vocabulary of a round, and the first beyond it."""
        width = self.columns * TILE_V
        return round * width, min((round + 1) * width, V)


def tile_lists(kept: Tensor, capacity: int) -> TileLists:
    return TileLists(kept, capacity // len(kept))


def new_kept_buffer(logits: ShardLogits, capacity: int) -> Tensor:
    blocks, _ = tile_grid(logits.T, logits.V)
    return logits.hidden.new_empty(logits.T, min(logits.V, capacity // blocks * TILE_V))


def kept_dlogits(
    logits: ShardLogits, rows: RowGradient, scale: Tensor | None, lists: TileLists, round: int, *,
    out: Tensor,
) -> Tensor:  # fmt: skip
    part = logits.columns(*lists.window(round, logits.V))
    d = out[:, : part.V]
    if scale is not None:
        rows = rows._replace(label_value=scale * rows.label_value, affine=(scale,))
    dlogits(part, rows.reference, rows.label_value, rows.affine, out=d)
    kept = lists.kept[:, round * lists.columns :][:, : lists.columns]
    d.masked_fill_(~_spread(_of_tokens(kept, logits.T), d.shape[1]), 0.0)
    return d


def add_kept_dhidden(d: Tensor, weight: Tensor, lists: TileLists, round: int, acc: Tensor) -> None:
    rows = slice(*lists.window(round, len(weight)))
    gemm.add_matmul(acc, d, weight[rows], first=False)


def kept_dweight(
    d: Tensor, hidden: Tensor, lists: TileLists, round: int, q: Tensor, hbar: Tensor,
    row: Tensor | None, *, out: Tensor, accumulates: bool,
) -> None:  # fmt: skip
    rows = torch.arange(*lists.window(round, len(out)), device=d.device)
    for part in gemm.slices(len(rows), 4 * hidden.shape[1]):
        v = rows[part]
        total = q[v, None] * hbar[v // TILE_V]
        if row is not None:
            total += row
        gemm.add_matmul(total, d[:, part].T, hidden, first=False)
        out[v] = (out[v] + total if accumulates else total).to(out.dtype)


def add_kept_dbias(
    d: Tensor, scale: Tensor | None, lists: TileLists, round: int, out: Tensor
) -> None:
    scale = out.new_ones(len(d)) if scale is None else scale
    out[slice(*lists.window(round, len(out)))] += gemm.weighted_row_sum(scale, d)


def _of_tokens(kept: Tensor, T: int) -> Tensor:
    """Repeat the rows of ``kept`` [blocks, tiles] for their T tokens."""
    return kept.repeat_interleave(TILE_T, 0)[:T]


def _tile_sums(x: Tensor) -> Tensor:
    """Sum x [V] over each tile, to [tiles]."""
    return F.pad(x, (0, -len(x) % TILE_V)).view(-1, TILE_V).sum(1)


def _spread(x: Tensor, V: int) -> Tensor:
    """Repeat the last dimension of x, tiles, for their V rows."""
    return x.repeat_interleave(TILE_V, -1)[..., :V]
