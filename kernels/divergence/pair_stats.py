"""``formulas.stats_of_totals`` in one launch.  T = tokens, P = ranks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.divergence.formulas import Measure, PairStats


@triton.jit
def _log_total(rows_ptr, rank_stride, stride, P, offs_t, mask):
    """The largest maximum of all ranks, and the log of the sum relative to it, in fp64."""
    top = tl.full(offs_t.shape, -float("inf"), tl.float32)
    for rank in range(0, P):
        maximum = tl.load(rows_ptr + rank * rank_stride + offs_t, mask=mask, other=0.0)
        # A comparison keeps a NaN, which tl.maximum would drop.
        top = tl.where(maximum <= top, top, maximum)
    total = tl.zeros(offs_t.shape, tl.float64)
    for rank in range(0, P):
        ptrs = rows_ptr + rank * rank_stride + offs_t
        maximum = tl.load(ptrs, mask=mask, other=0.0)
        sums = tl.load(ptrs + stride, mask=mask, other=0.0)
        factor = tl.exp((maximum - top).to(tl.float64))
        total += tl.where(maximum == -float("inf"), 0.0, factor * sums)
    return top, tl.log(total)


@triton.jit(do_not_specialize=["T"])
def _pair_stats_kernel(
    rows_ptr,  # in:  [P, 5, T] fp32
    stats_ptr,  # out: [7, T] fp32, in the order of PairStats
    P, T,
    TEACHER_FIRST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_T tokens."""
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = offs_t < T
    top, log_total = _log_total(rows_ptr, 5 * T, T, P, offs_t, mask)
    second_top, second_log_total = _log_total(rows_ptr + 2 * T, 5 * T, T, P, offs_t, mask)
    weighted = tl.zeros((BLOCK_T,), tl.float64)
    for rank in range(0, P):
        ptrs = rows_ptr + rank * 5 * T + offs_t
        maximum = tl.load(ptrs, mask=mask, other=0.0)
        factor = tl.exp((maximum - top).to(tl.float64))
        terms = factor * tl.load(ptrs + 4 * T, mask=mask, other=0.0)
        weighted += tl.where(maximum == -float("inf"), 0.0, terms)
    shift = log_total - second_log_total
    value = weighted * tl.exp(-log_total) - (top.to(tl.float64) - second_top) - shift
    value = tl.where(value < 0.0, 0.0, value).to(tl.float32)
    if TEACHER_FIRST:
        shift = -shift
    own = 2 * T if TEACHER_FIRST else 0
    theirs = 0 if TEACHER_FIRST else 2 * T
    tl.store(stats_ptr + own + offs_t, top, mask=mask)
    tl.store(stats_ptr + own + T + offs_t, log_total.to(tl.float32), mask=mask)
    tl.store(stats_ptr + theirs + offs_t, second_top, mask=mask)
    tl.store(stats_ptr + theirs + T + offs_t, second_log_total.to(tl.float32), mask=mask)
    tl.store(stats_ptr + 4 * T + offs_t, shift.to(tl.float32), mask=mask)
    tl.store(stats_ptr + 5 * T + offs_t, value, mask=mask)
    tl.store(stats_ptr + 6 * T + offs_t, value, mask=mask)


def stats_of_totals(of_ranks: Tensor, measure: Measure, dtype: torch.dtype) -> PairStats:
    """As in ``formulas.py``, of contiguous fp32 rows [P, 5, T]."""
    P, _, T = of_ranks.shape
    stats = of_ranks.new_empty(len(PairStats._fields), T)
    if T:
        _pair_stats_kernel[(-(-T // 128),)](
            of_ranks,
            stats,
            P, T,
            TEACHER_FIRST=measure.is_teacher_first, BLOCK_T=128, num_warps=4,
        )  # fmt: skip
    return PairStats(*stats.unbind())
