"""Which tokens the profiles of tiles are taken from.  T = tokens."""

import triton.language as tl
from torch import Tensor

from flce_dist.kernels.counted_tokens import counts
from flce_dist.kernels.filtered.tiles import SAMPLE
from flce_dist.kernels.kernel import Kernel

_SAMPLE = tl.constexpr(SAMPLE)


@Kernel
def _sample_kernel(
    labels_ptr, scale_ptr,  # in:  [T] int64, [T] fp32
    sample_ptr,  # out: [SAMPLE] int64
    T,
    ignore_index,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program takes those of its BLOCK_T tokens that are in the sample: one of each run."""
    mine = tl.program_id(0) * BLOCK_T
    before, n = tl.zeros((BLOCK_T,), tl.int64), tl.zeros((BLOCK_T,), tl.int64)
    for start in range(0, T, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        counted, _, _ = counts(labels_ptr, scale_ptr, offs_t, T, ignore_index, BLOCK_T)
        n += counted.to(tl.int64)
        before += tl.where(start < mine, counted.to(tl.int64), 0)
    n = tl.sum(n, axis=0)
    offs_t = mine + tl.arange(0, BLOCK_T)
    counted, _, _ = counts(labels_ptr, scale_ptr, offs_t, T, ignore_index, BLOCK_T)
    ordinal = tl.sum(before, axis=0) + tl.cumsum(counted.to(tl.int64), axis=0) - 1
    some = tl.maximum(n, 1)
    runs = tl.minimum(some, _SAMPLE)
    i = ((ordinal + 1) * runs - 1) // some
    first, after = i * n // runs, (i + 1) * n // runs
    place = ((after - first) * (((i + 1) * 0x9E3779B9) & 0xFFFFFFFF)) >> 32
    tl.store(sample_ptr + i, offs_t.to(tl.int64), mask=counted & (ordinal == first + place))
    if mine == 0:
        offs = tl.arange(0, _SAMPLE).to(tl.int64)
        tl.store(sample_ptr + offs, offs * 0 - 1, mask=offs >= n)


def profile_sample(labels: Tensor, scale: Tensor, *, ignore_index: int) -> Tensor:
    """Return [SAMPLE] int64: tokens from which profiles are taken, -1 after the last.

    labels are [T] int64, and scale [T] is 0 where a token may not be taken. By the golden ratio
    places in a run share no period with sequences.
    """
    sample = labels.new_empty(SAMPLE)
    BLOCK_T = 2048
    _sample_kernel[(max(1, -(-len(labels) // BLOCK_T)),)](
        labels, scale,
        sample,
        len(labels),
        ignore_index,
        BLOCK_T=BLOCK_T, num_warps=8,
    )  # fmt: skip
    return sample
