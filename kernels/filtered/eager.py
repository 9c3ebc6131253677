"""Filtered gradients in plain PyTorch, where D contains the tiles that are not kept.

Functions of ``gpu.py`` have their docstrings there. T = tokens, V = vocabulary rows here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist.kernels.filtered.tiles import SAMPLE, TILE_T, TILE_V, tile_grid
from flce_dist.kernels.logits.eager import windows, write_at_labels
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.rows.counted_tokens import counts
from flce_dist.kernels.rows.formulas import TokenStats, first_reference


def new_tile_stats(logits: ShardLogits) -> Tensor:
    _, tiles = tile_grid(logits.T, logits.V)
    return logits.hidden.new_empty(2, tiles, logits.T, dtype=logits.stats_dtype)


def write_tile_stats(logits: ShardLogits, reference: Tensor, tiles: Tensor) -> None:
    """Write the maxima and sums of exp(z - reference) in each tile, without the labels."""
    ignored = ~logits.counted
    none = torch.full_like(reference, -torch.inf)
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
    lse = stats.lse
    counted = logits.counted
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


def profile_sample(labels: Tensor, scale: Tensor, *, ignore_index: int) -> Tensor:
    ordinal = counts(labels, scale, ignore_index).cumsum(0)
    n = ordinal[-1]
    i = torch.arange(SAMPLE + 1, device=labels.device)
    first = i * n // n.clamp(1, SAMPLE)
    place = (first.diff() * (i[1:] * 0x9E3779B9 & 0xFFFFFFFF)) >> 32  # n / SAMPLE < 2**31
    token = torch.searchsorted(ordinal, first[:-1] + place, right=True)  # T if there is none
    return token.where(token < len(labels), -1)


def tile_profile(logits: ShardLogits, lse: Tensor, kept: Tensor, sample: Tensor) -> Tensor:
    tokens = sample.clamp_min(0)
    of_tiles = kept[tokens // TILE_T] | (sample < 0)[:, None]
    total = lse.new_empty(logits.V)
    for start, z in windows(logits.rows(tokens)):
        columns = torch.arange(start, start + z.shape[1], device=z.device)
        left_out = ~of_tiles[:, columns // TILE_V]
        total[columns] = (z - lse[tokens, None]).exp().where(left_out, 0.0).sum(0)
    return total


class RankOne:
    """D of tiles that are not kept: ``scale`` [T] times mass [tiles, T] times the profile [V].

    ``total`` [V] is that of ``tile_profile``; its share of a tile, or an even one where it is 0, is
    the profile.
    """

    def __init__(
        self, logits: ShardLogits, total: Tensor, kept: Tensor, mass: Tensor, scale: Tensor | None
    ):
        even = torch.ones_like(total)
        if logits.bias is not None:
            even = (logits.bias != -torch.inf).to(total)
        profile = total.where(_spread(_tile_sums(total) > 0, logits.V), even)
        of_tile = _spread(_tile_sums(profile), logits.V)
        self.profile = profile / of_tile.clamp_min(torch.finfo(profile.dtype).tiny)
        self.is_kept = _of_tokens(kept, logits.T)
        self.mass = mass.T.to(profile)
        if scale is not None:
            self.mass = self.mass * scale[:, None]

    def write(self, d: Tensor, start: int) -> None:
        columns = torch.arange(start, start + d.shape[1], device=d.device)
        tile = columns // TILE_V
        rank_one = (self.mass[:, tile] * self.profile[columns]).to(d.dtype)
        d.copy_(d.where(self.is_kept[:, tile], rank_one))


def _of_tokens(kept: Tensor, T: int) -> Tensor:
    """Repeat the rows of ``kept`` [blocks, tiles] for their T tokens."""
    return kept.repeat_interleave(TILE_T, 0)[:T]


def _tile_sums(x: Tensor) -> Tensor:
    """Sum x [V] over each tile, to [tiles]."""
    return F.pad(x, (0, -len(x) % TILE_V)).view(-1, TILE_V).sum(1)


def _spread(x: Tensor, V: int) -> Tensor:
    """Repeat the last dimension of x, tiles, for their V rows."""
    return x.repeat_interleave(TILE_V, -1)[..., :V]
