"""Passes over the stored logits of a pair: sums with known lse, and D.

Memory is what they take: 8 bytes of logits for each element, and 2 to 4 of D. ``formulas.py`` has
the mathematics. T = tokens, V = vocabulary rows here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.divergence.formulas import Measure, PairStats
from flce_dist.kernels.logits.exact_sums import nearest_multiple
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.primitives import cast, computed, exp, log1p_series, softcap_slope
from flce_dist.kernels.tuning import next_power_of_2

_TILE_T = 128  # tokens of the largest tile of logits, in which D that is read is 0 to the end
_BLOCK = 4096  # columns of a token at a time
_BLOCK_OF_SUMS = 2048
_GROUP = 32  # columns whose sum is rounded to _UNIT where sums must not depend on shards
_UNIT = tl.constexpr(2.0**-34)  # multiples of which add up exactly to 2^18 ids of probability 1


@triton.jit
def _expm1(x):
    """``exp(x) - 1`` with the relative accuracy of x; the next term of the series is below 1e-8."""
    series = x * (1 / 5040)
    series = x * (1 / 720 + series)
    series = x * (1 / 120 + series)
    series = x * (1 / 24 + series)
    series = x * (1 / 6 + series)
    series = x * (1 + x * (1 / 2 + series))
    return tl.where(tl.abs(x) < 0.25, series, exp(x) - 1)


@triton.jit
def _log1p_below_0(x):
    """``log(1 + x)`` for x <= 0, with the relative accuracy of x near 0."""
    series = log1p_series(x)
    return tl.where(x > -0.5, series, tl.log(1 + x))


@triton.jit
def _log_ratios(d, beta):
    """``log(q / m)`` and ``log(p / m)``: of the larger of p and q one logarithm, near 0."""
    distance = tl.abs(d)
    of_larger = -_log1p_below_0(tl.where(d > 0, beta, 1 - beta) * _expm1(-distance))
    of_smaller = of_larger - distance
    return tl.where(d > 0, of_smaller, of_larger), tl.where(d > 0, of_larger, of_smaller)


@triton.jit
def _weighted(p, x):
    """p x, but 0 where p is 0: there x may be infinite or NaN."""
    return tl.where(p == 0.0, 0.0, p * x)


@triton.jit
def _plus(total, x, GROUP: tl.constexpr):
    """Add x [BLOCK] to a total, by elements, or by groups of columns in fixed point in fp64."""
    if GROUP is None:
        return total + x
    else:
        terms = tl.sum(tl.reshape(x, (x.shape[0] // GROUP, GROUP)), axis=1).to(tl.float64)
        return total + nearest_multiple(terms, _UNIT)


@triton.jit(do_not_specialize=["T"])
def _pair_sums_kernel(
    s_ptr, t_ptr, labels_ptr,  # in:  [T, V] fp32 each, [T] int64
    top_ptr, log_total_ptr, teacher_top_ptr, teacher_log_total_ptr, shift_ptr,  # in:  [T] fp32 each
    sums_ptr,  # out: [k, T] fp64
    T, V,
    stride_s_t, stride_t_t,
    vocab_start_index, ignore_index, beta,
    KIND: tl.constexpr, WITH_METRICS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A program takes one token."""
    t = tl.program_id(0).to(tl.int64)  # T * V passes 2**31 at 16k x 128k
    counted = tl.load(labels_ptr + t) != ignore_index
    top = tl.load(top_ptr + t)
    log_total = tl.load(log_total_ptr + t)
    teacher_top = tl.load(teacher_top_ptr + t)
    teacher_log_total = tl.load(teacher_log_total_ptr + t)
    shift = tl.load(shift_ptr + t)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_theirs = best
    place = tl.zeros((BLOCK,), tl.int32)
    place_theirs = place
    if GROUP is None:
        first = tl.zeros((BLOCK,), tl.float32)
    else:
        first = tl.zeros((BLOCK // GROUP,), tl.float64)
    second = first
    own = first
    theirs = first
    above = first
    for start in range(0, tl.where(counted, V, 0), BLOCK):
        offs_v = start + tl.arange(0, BLOCK)
        mask = offs_v < V
        s = tl.load(s_ptr + t * stride_s_t + offs_v, mask=mask, other=-float("inf"))
        y = tl.load(t_ptr + t * stride_t_t + offs_v, mask=mask, other=-float("inf"))
        x = s - top
        y = y - teacher_top
        log_p = x - log_total
        log_q = y - teacher_log_total
        d = (x - y) - shift
        p = exp(log_p)
        q = exp(log_q)
        if KIND == "totals":
            first = _plus(first, exp(x), GROUP)
            second = _plus(second, exp(y), GROUP)
        elif KIND == "forward_kl":
            first = _plus(first, _weighted(q, -d), GROUP)
        elif KIND == "reverse_kl":
            first = _plus(first, _weighted(p, d), GROUP)
        elif KIND == "jsd":
            of_teacher, of_student = _log_ratios(d, beta)
            first = _plus(first, _weighted(q, of_teacher), GROUP)
            second = _plus(second, _weighted(p, of_student), GROUP)
        if KIND == "tv" or WITH_METRICS:
            more = tl.where(d > 0, -p * _expm1(-d), 0.0)
        if KIND == "tv":
            first = _plus(first, more, GROUP)
            second = _plus(second, tl.where(d > 0, p, 0.0), GROUP)
        if WITH_METRICS:
            above = _plus(above, more, GROUP)
            own = _plus(own, -_weighted(p, log_p), GROUP)
            theirs = _plus(theirs, -_weighted(q, log_q), GROUP)
            place = tl.where(x > best, offs_v, place)
            best = tl.maximum(best, x)
            place_theirs = tl.where(y > best_theirs, offs_v, place_theirs)
            best_theirs = tl.maximum(best_theirs, y)
    sums_ptr += t
    stride = tl.cast(T, tl.int64)
    tl.store(sums_ptr, tl.sum(first, axis=0).to(tl.float64))
    sums_ptr += stride
    if KIND != "forward_kl" and KIND != "reverse_kl":
        tl.store(sums_ptr, tl.sum(second, axis=0).to(tl.float64))
        sums_ptr += stride
    if WITH_METRICS:
        tl.store(sums_ptr, tl.sum(own, axis=0).to(tl.float64))
        tl.store(sums_ptr + stride, tl.sum(theirs, axis=0).to(tl.float64))
        tl.store(sums_ptr + 2 * stride, tl.sum(above, axis=0).to(tl.float64))
        _store_best(sums_ptr + 3 * stride, stride, best, place, vocab_start_index)
        _store_best(sums_ptr + 5 * stride, stride, best_theirs, place_theirs, vocab_start_index)


@triton.jit
def _store_best(sums_ptr, stride, best, place, vocab_start_index):
    """Store the largest logit and the smallest id that has it."""
    largest = tl.max(best, axis=0)
    place = tl.min(tl.where(best == largest, place, 0x7FFFFFFF), axis=0)
    tl.store(sums_ptr, largest.to(tl.float64))
    tl.store(sums_ptr + stride, (place.to(tl.int64) + vocab_start_index).to(tl.float64))


def pair_sums(
    s: Tensor, t: Tensor, logits: ShardLogits, stats: PairStats, measure: Measure, *,
    with_metrics: bool, is_invariant: bool,
) -> Tensor:  # fmt: skip
    """Return [k, T] fp64, sums over this shard's columns of what follows from both lse.

    k is ``measure.sums``; with metrics 7 more rows: both entropies, the total variation, then the
    largest logit, relative to ``top``, and its smallest id of the student, and of the teacher. 0
    where ignored. Of ``TOTALS`` the sums of exponentials relative to ``top``. Sums that are
    ``is_invariant`` are multiples of 2^-34, and add up over shards to the same bits however the
    vocabulary is cut at multiples of 32 rows.
    """
    T, V = s.shape
    sums = torch.empty(measure.sums + 7 * with_metrics, T, dtype=torch.float64, device=s.device)
    block = _BLOCK_OF_SUMS if is_invariant else min(_BLOCK_OF_SUMS, next_power_of_2(V))
    if T:
        _pair_sums_kernel[(T,)](
            s, t, logits.labels,
            *stats[:5],
            sums,
            T, V,
            s.stride(0), t.stride(0),
            logits.vocab_start_index, logits.ignore_index, measure.beta,
            KIND=measure.kind, WITH_METRICS=with_metrics,
            BLOCK=block,
            GROUP=_GROUP if is_invariant else None, num_warps=8,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["T"])
def _pair_dlogits_kernel(
    s_ptr, t_ptr, labels_ptr,  # in:  [T, V] fp32 each, [T] int64
    top_ptr, log_total_ptr, teacher_top_ptr, teacher_log_total_ptr, shift_ptr,  # in:  [T] fp32 each
    centre_ptr, scale_ptr,  # in:  [T] fp32 each
    out_ptr,  # out: [T, V]
    T, V,
    stride_s_t, stride_t_t, stride_out_t,
    scalars, beta,  # those of ShardLogits
    KIND: tl.constexpr, TILE_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program writes BLOCK columns of one token."""
    t = tl.program_id(0).to(tl.int64)  # T * V passes 2**31 at 16k x 128k
    ignore_index, _, softcap, inverse_ptr, count_ptr = scalars
    offs_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Beyond a whole tile of logits after the last token that counts nobody reads.
    mask = offs_v < tl.where(t < computed(count_ptr, T) + TILE_T, V, 0)
    counted = tl.load(labels_ptr + t) != ignore_index
    mask_in = mask & counted
    s = tl.load(s_ptr + t * stride_s_t + offs_v, mask=mask_in, other=-float("inf"))
    y = tl.load(t_ptr + t * stride_t_t + offs_v, mask=mask_in, other=-float("inf"))
    x = s - tl.load(top_ptr + t)
    y = y - tl.load(teacher_top_ptr + t)
    p = exp(x - tl.load(log_total_ptr + t))
    if KIND == "forward_kl":
        dz = p - exp(y - tl.load(teacher_log_total_ptr + t))
    else:
        d = (x - y) - tl.load(shift_ptr + t)
        centre = tl.load(centre_ptr + t)
        if KIND == "reverse_kl":
            dz = _weighted(p, d - centre)
        elif KIND == "jsd":
            _, of_student = _log_ratios(d, beta)
            dz = (1 - beta) * _weighted(p, of_student - centre)
        else:
            dz = p * (tl.where(d > 0, 1.0, 0.0) - centre)
    dz *= tl.load(scale_ptr + t)
    if softcap is not None:
        inverse = 1.0
        if inverse_ptr is not None:
            inverse = tl.load(inverse_ptr + t)
        dz *= softcap_slope(s, softcap, inverse)
    dz = tl.where(counted, dz, 0.0)
    tl.store(out_ptr + t * stride_out_t + offs_v, cast(dz, out_ptr.dtype.element_ty), mask=mask)


def pair_dlogits(
    s: Tensor, t: Tensor, logits: ShardLogits, stats: PairStats, measure: Measure, scale: Tensor, *,
    out: Tensor,
) -> None:  # fmt: skip
    """Write D to ``out`` [T, V], in hidden's dtype: ``scale`` [T] times softcap' times the gradient
    of each token's value by the student's tempered logits; 0 where ignored.
    """
    T, V = s.shape
    if T == 0 or V == 0:
        return
    block = min(_BLOCK, next_power_of_2(V))
    _pair_dlogits_kernel[(T, -(-V // block))](
        s, t, logits.labels,
        *stats[:5],
        stats.centre, scale,
        out,
        T, V,
        s.stride(0), t.stride(0), out.stride(0),
        logits.scalars, measure.beta,
        KIND=measure.kind, TILE_T=_TILE_T, BLOCK=block, num_warps=8,
    )  # fmt: skip
