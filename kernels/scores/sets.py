"""Softmax over each token's set of ids, which has each id once.  T tokens, N ids of all.

With r the largest logit of the set, and S the sum of ``exp(z_n - r)`` over the set without that top
entry, ``logprob_n = z_n - r - log1p(S)``: no cancellation where one id has nearly all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.primitives import exp, log1p, times_exponent
from flce_dist.kernels.scores.token_ids import TokenIds

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
        x = tl.load(z_ptr + n, mask=in_set, other=0.0) - reference
        is_other = in_set & (n != top)
        e = tl.where(is_other, exp(x), 0.0)
        others += tl.sum(e, axis=0)
        weighted += tl.sum(tl.where(is_other, times_exponent(e, x), 0.0), axis=0)
    return reference, top, others, weighted


@Kernel
def _set_scores_kernel(
    z_ptr, ids_ptr, offsets_ptr, first_ptr, place_ptr,  # in:  [N] fp32, as in TokenIds
    logprob_ptr, lse_ptr, entropy_ptr,  # out: [N], [T], [T] fp32
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program scores one token."""
    t = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets_ptr + t), tl.load(offsets_ptr + t + 1)
    reference, top, others, weighted = _statistics(z_ptr, first_ptr, begin, end, BLOCK_N)
    below = log1p(others)
    is_counted = top < end
    tl.store(lse_ptr + t, tl.where(is_counted, reference + below, 0.0))
    if entropy_ptr is not None:
        tl.store(entropy_ptr + t, tl.where(is_counted, below - weighted / (1 + others), 0.0))
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        is_id = tl.load(ids_ptr + n, mask=n < end, other=-1) >= 0
        z = tl.load(z_ptr + n, mask=n < end, other=0.0)
        place = tl.load(place_ptr + n, mask=n < end, other=0)
        logprob = tl.where(is_id, z - reference - below, 0.0)
        tl.store(logprob_ptr + place, logprob, mask=n < end)


def set_scores(
    z: Tensor, ids: TokenIds, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``(logprob, lse, entropy)``: [N] in the caller's order, [T], and [T] or None.

    z is [N] fp32, of all ranks. 0 at padding, and for tokens without ids.
    """
    T = len(ids.offsets) - 1
    logprob, lse = torch.empty_like(z), z.new_empty(T)
    entropy = z.new_empty(T) if with_entropy else None
    if T:
        _set_scores_kernel[(T,)](
            z, ids.ids, ids.offsets, ids.first, ids.place,
            logprob, lse, entropy,
            BLOCK_N=_BLOCK_N, num_warps=1,
        )  # fmt: skip
    return logprob, lse, entropy
