"""The tiles of filtered gradients, TILE_T tokens by TILE_V vocabulary rows; sampled tokens."""

import torch
from torch import Tensor

from flce_dist.kernels.counted_tokens import counts

TILE_T, TILE_V = 128, 256
SAMPLE = 128  # tokens from which the profile of the tiles is taken, or all that count


def tile_grid(T: int, V: int) -> tuple[int, int]:
    """Return the blocks of tokens and the tiles of vocabulary rows."""
    return -(-T // TILE_T), -(-V // TILE_V)


def profile_sample(labels: Tensor, scale: Tensor, *, ignore_index: int) -> Tensor:
    """Return [SAMPLE] int64: tokens from which profiles are taken, -1 after the last.

    labels are [T] int64, and scale [T] is 0 where a token may not be taken. Of equal runs of the
    others each gives one; by the golden ratio places in a run share no period with sequences.
    """
    ordinal = counts(labels, scale, ignore_index).cumsum(0)
    n, i = ordinal[-1], torch.arange(SAMPLE + 1, device=labels.device)
    first = i * n // n.clamp(1, SAMPLE)
    place = (first.diff() * (i[1:] * 0x9E3779B9 & 0xFFFFFFFF)) >> 32  # n / SAMPLE < 2**31
    token = torch.searchsorted(ordinal, first[:-1] + place, right=True)  # T if there is none
    return token.where(token < len(labels), -1)
