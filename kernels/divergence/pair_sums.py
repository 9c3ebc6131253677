"""A pass over the stored logits of a pair: sums with known lse.

Memory is what it takes: 8 bytes of logits for each element. ``formulas.py`` has the mathematics.
T = tokens, V = vocabulary rows here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.divergence.formulas import METRIC_ROWS, Measure, PairStats
from flce_dist.kernels.divergence.pair_terms import expm1, log_ratios, weighted
from flce_dist.kernels.logits.exact_sums import nearest_multiple
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.primitives import exp
from flce_dist.kernels.tuning import next_power_of_2

_BLOCK = 2048  # columns of a token at a time
_GROUP = 32  # columns whose sum is rounded to _UNIT where sums must not depend on shards
# fp64 adds multiples of it exactly up to 2^19, which so many exponentials relative to top reach.
_UNIT = tl.constexpr(2.0**-34)


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
            first = _plus(first, weighted(q, -d), GROUP)
        elif KIND == "reverse_kl":
            first = _plus(first, weighted(p, d), GROUP)
        elif KIND == "jsd":
            of_teacher, of_student = log_ratios(d, beta)
            first = _plus(first, weighted(q, of_teacher), GROUP)
            second = _plus(second, weighted(p, of_student), GROUP)
        if KIND == "tv" or WITH_METRICS:
            more = tl.where(d > 0, -p * expm1(-d), 0.0)
        if KIND == "tv":
            first = _plus(first, more, GROUP)
            second = _plus(second, tl.where(d > 0, p, 0.0), GROUP)
        if WITH_METRICS:
            above = _plus(above, more, GROUP)
            own = _plus(own, -weighted(p, log_p), GROUP)
            theirs = _plus(theirs, -weighted(q, log_q), GROUP)
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

    k is ``measure.sums``, with metrics METRIC_ROWS more: both entropies, the total variation, then
    the largest logit (here, not in ``eager.py``, relative to ``top``) and its smallest id, of the
    student and of the teacher. 0 where ignored. Of ``TOTALS`` the sums of exponentials relative to
    ``top``. Sums that are ``is_invariant`` are multiples of 2^-34, and add up over shards to the
    same bits however the vocabulary is cut at multiples of 32 rows.
    """
    T, V = s.shape
    rows = measure.sums + METRIC_ROWS * with_metrics
    sums = torch.empty(rows, T, dtype=torch.float64, device=s.device)
    block = _BLOCK if is_invariant else min(_BLOCK, next_power_of_2(V))
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
