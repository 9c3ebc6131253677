"""Which tokens the profiles of tiles are taken from.  T = tokens."""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.filtered.tiles import SAMPLE

_SAMPLE = tl.constexpr(SAMPLE)
_BLOCK_T = 2048


@triton.jit(do_not_specialize=["T"])
def _sample_kernel(
    labels_ptr, scale_ptr,  # in:  [T] int64, [T] fp32
    sample_ptr,  # out: [SAMPLE] int64
    T, ignore_index,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program counts all tokens, and writes those of its BLOCK_T that are in the sample."""
    first = tl.program_id(0) * BLOCK_T
    offs_t = tl.arange(0, BLOCK_T)
    n = tl.zeros((BLOCK_T,), tl.int64)
    before = tl.zeros((BLOCK_T,), tl.int64)
    own = tl.zeros((BLOCK_T,), tl.int64)
    for start in range(0, T, BLOCK_T):
        mask = start + offs_t < T
        label = tl.load(labels_ptr + start + offs_t, mask=mask, other=ignore_index)
        scale = tl.load(scale_ptr + start + offs_t, mask=mask, other=0.0)
        counted = ((label != ignore_index) & (scale != 0.0)).to(tl.int64)
        n += counted
        before += tl.where(start < first, counted, 0)
        own = tl.where(start == first, counted, own)
    n = tl.sum(n, axis=0)
    ordinal = tl.sum(before, axis=0) + tl.cumsum(own, axis=0) - 1
    some = tl.maximum(n, 1)
    runs = tl.minimum(some, _SAMPLE)
    i = ((ordinal + 1) * runs - 1) // some
    begin = i * n // runs
    end = (i + 1) * n // runs
    place = ((end - begin) * (((i + 1) * 0x9E3779B9) & 0xFFFFFFFF)) >> 32
    tl.store(sample_ptr + i, first + offs_t, mask=(own > 0) & (ordinal == begin + place))
    i = tl.arange(0, _SAMPLE)
    tl.store(sample_ptr + i, -1, mask=(i >= n) & (first == 0))


def profile_sample(labels: Tensor, scale: Tensor, *, ignore_index: int) -> Tensor:
    """Return [SAMPLE] int64: tokens from which profiles are taken, -1 after the last.

    labels are [T] int64, and scale [T] is 0 where a token may not be taken. Of equal runs of the
    others each gives one; by the golden ratio places in a run share no period with sequences.
    """
    sample = labels.new_empty(SAMPLE)
    _sample_kernel[(max(1, -(-len(labels) // _BLOCK_T)),)](
        labels, scale,
        sample,
        len(labels), ignore_index,
        BLOCK_T=_BLOCK_T, num_warps=8,
    )  # fmt: skip
    return sample
