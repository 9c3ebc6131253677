"""Scores of each token's set of ids, which has each id once.  T tokens, N ids of all.

With r the largest logit of the set, and S the sum of ``exp(z_n - r)`` over the set without that top
entry, ``logprob_n = z_n - r - log1p(S)``: no cancellation where one id has nearly all.

Over the vocabulary S contains U, the sum over the ids that are not named, and ``other`` is the log
of ``U / (1 + S)``. r is the reference of U if that is larger (``rescue.py``).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.primitives import exp, log1p, times_exponent
from flce_dist.kernels.scores.token_ids import TokenIds
from flce_dist.kernels.token_loss_formulas import TokenStats

_BLOCK_N = 128  # entries of one step


@triton.jit
def _statistics(z_ptr, first_ptr, begin, end, BLOCK_N: tl.constexpr):
    """Return r, the top entry, S, and the sum of ``exp(z_n - r) (z_n - r)``."""
    reference, top = -float("inf"), end
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_set = tl.load(first_ptr + n, mask=n < end, other=0) != 0
        z = tl.load(z_ptr + n, mask=in_set, other=-float("inf"))
        largest = tl.max(z, axis=0)
        place = tl.min(tl.where(in_set & (z == largest), n, end), axis=0)
        top = tl.where((largest > reference) | (top == end), place, top)
        reference = tl.maximum(reference, largest)
    others, weighted = 0.0, 0.0
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_set = tl.load(first_ptr + n, mask=n < end, other=0) != 0
        z = tl.load(z_ptr + n, mask=in_set, other=0.0)
        x = tl.where(z == -float("inf"), z, z - reference)  # not NaN if all are banned
        is_other = in_set & (n != top)
        e = tl.where(is_other, exp(x), 0.0)
        others += tl.sum(e, axis=0)
        weighted += tl.sum(tl.where(is_other, times_exponent(e, x), 0.0), axis=0)
    return reference, top, others, weighted


@triton.jit
def _with_rest(reference_ptr, others_ptr, weighted_ptr, t, top_logit, others, weighted):
    """Return r, S, the top entry's exponential, the sum of ``exp(x) x``, and U."""
    if others_ptr is None:
        return top_logit, others, 1.0, weighted, 0.0
    else:
        given = tl.load(reference_ptr + t)
        reference = tl.maximum(given, top_logit)
        above, change = top_logit - reference, given - reference
        e_top, factor = exp(above), exp(change)
        unnamed = tl.load(others_ptr + t) * factor
        if weighted_ptr is not None:  # x of a named id is that of the set, and above
            weighted = tl.where(e_top == 0.0, 0.0, e_top * (weighted + (1 + others) * above))
            weighted += factor * tl.load(weighted_ptr + t) + unnamed * change
        return reference, others * e_top + unnamed, e_top, weighted, unnamed


@Kernel
def _set_scores_kernel(
    z_ptr, ids_ptr, offsets_ptr, first_ptr, place_ptr,  # in:  [N] fp32, as in TokenIds
    reference_ptr, others_ptr, weighted_ptr,  # in:  [T] fp32 of TokenStats, or None
    logprob_ptr, lse_ptr, entropy_ptr, other_ptr,  # out: [N], [T], [T], [T] fp32
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program scores one token."""
    t = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets_ptr + t), tl.load(offsets_ptr + t + 1)
    top_logit, top, in_set, weighted = _statistics(z_ptr, first_ptr, begin, end, BLOCK_N)
    reference, others, e_top, weighted, unnamed = _with_rest(
        reference_ptr, others_ptr, weighted_ptr, t, top_logit, in_set, weighted
    )
    below = log1p(others + (e_top - 1))
    is_counted = top < end
    tl.store(lse_ptr + t, tl.where(is_counted, reference + below, 0.0))
    if entropy_ptr is not None:
        entropy = below - weighted / (e_top + others)
        tl.store(entropy_ptr + t, tl.where(is_counted, entropy, 0.0))
    if other_ptr is not None:
        named = e_top * (1 + in_set)
        other = tl.where(unnamed > named, -log1p(named / unnamed), tl.log(unnamed) - below)
        other = tl.where(unnamed == 0.0, -float("inf"), other)
        tl.store(other_ptr + t, tl.where(is_counted, other, 0.0))
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        is_id = tl.load(ids_ptr + n, mask=n < end, other=-1) >= 0
        z = tl.load(z_ptr + n, mask=n < end, other=0.0)
        place = tl.load(place_ptr + n, mask=n < end, other=0)
        logprob = tl.where(is_id, z - reference - below, 0.0)
        tl.store(logprob_ptr + place, logprob, mask=n < end)


def set_scores(
    z: Tensor, ids: TokenIds, rest: TokenStats | None, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return ``(logprob, lse, other, entropy)``: [N] in the caller's order, and [T] or None each.

    z is [N] fp32, of all ranks. 0 at padding, and for tokens without ids. Over the vocabulary with
    ``rest``, statistics of the ids that are not named, else over the ids.
    """
    T = len(ids.offsets) - 1
    logprob, lse = torch.empty_like(z), z.new_empty(T)
    entropy = z.new_empty(T) if with_entropy else None
    other = None if rest is None else z.new_empty(T)
    if T:
        _set_scores_kernel[(T,)](
            z, ids.ids, ids.offsets, ids.first, ids.place,
            *((None,) * 3 if rest is None else (rest.reference, rest.others, rest.sum_ez)),
            logprob, lse, entropy, other,
            BLOCK_N=_BLOCK_N, num_warps=1,
        )  # fmt: skip
    return logprob, lse, other, entropy
