"""The best ids of all ranks from those of each.  T = tokens, P = ranks, k = ids of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.best.keys import LOWEST_KEY, id_of, logit_of
from flce_dist.kernels.primitives import exp
from flce_dist.kernels.tuning import next_power_of_2

_SORTED_AT_ONCE = 1024  # keys of a program


@triton.jit(do_not_specialize=["T"])
def _merge_ranks_kernel(
    keys_ptr, lse_ptr, counted_ptr,  # in:  [P, T, k] int64, the best first; [T] fp64, [T] bool
    ids_ptr, logprob_ptr,  # out: [T, k] int64, fp32
    T, P, k, top_p,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_T tokens."""
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    i = tl.arange(0, BLOCK_K)[None, :]
    mask_t = t < T
    mask = (t < T) & (i < k)
    keys = tl.load(keys_ptr + t * k + i, mask=mask, other=LOWEST_KEY)
    backward = BLOCK_K - 1 - i
    for p in range(1, P):
        # Of two lists in opposite orders the larger of each place are the best of both; they rise
        # and then fall, so that a merge sorts them.
        place = (p * tl.cast(T, tl.int64) + t) * k + backward
        more = tl.load(keys_ptr + place, mask=mask_t & (backward < k), other=LOWEST_KEY)
        keys = tl.bitonic_merge(tl.maximum(keys, more), dim=1, descending=True)
    lse = tl.load(lse_ptr + t, mask=mask_t, other=0.0)
    is_counted = tl.load(counted_ptr + t, mask=mask_t, other=0) != 0
    is_id = (keys != LOWEST_KEY) & is_counted & (lse == lse)
    logprob = tl.minimum(logit_of(keys).to(tl.float64) - lse, 0.0)
    logprob = tl.where(is_id, logprob, -float("inf")).to(tl.float32)
    if top_p is not None:
        mass = tl.cumsum(exp(logprob), axis=1)
        kept = 1 + tl.sum((is_id & (mass < top_p)).to(tl.int32), axis=1)[:, None]
        is_id &= i < kept
        logprob = tl.where(is_id, logprob, -float("inf"))
    logprob = tl.where((lse != lse) & is_counted, float("nan"), logprob)
    tl.store(ids_ptr + t * k + i, tl.where(is_id, id_of(keys), -1), mask=mask)
    tl.store(logprob_ptr + t * k + i, logprob, mask=mask)


def merged_ids(
    pairs: Tensor, lse: Tensor, counted: Tensor, *, k: int, top_p: float | None
) -> tuple[Tensor, Tensor]:
    """Return ids [T, k] int64 and logprob [T, k] fp32 of the keys [P, T, k] of all ranks.

    The most likely comes first. Where there is no id it is -1, and logprob -inf; in tokens that are
    not ``counted`` [T], too. With lse NaN ids are -1 and logprob NaN. With ``top_p`` a token's ids
    end with the one at which their probabilities add up to it.
    """
    P, T, _ = pairs.shape
    ids = torch.empty(T, k, dtype=torch.int64, device=pairs.device)
    logprob = torch.empty(T, k, dtype=torch.float32, device=pairs.device)
    if T:
        BLOCK_K = max(2, next_power_of_2(k))
        BLOCK_T = max(1, _SORTED_AT_ONCE // BLOCK_K)
        _merge_ranks_kernel[(-(-T // BLOCK_T),)](
            pairs, lse, counted,
            ids, logprob,
            T, P, k, top_p,
            BLOCK_T=BLOCK_T, BLOCK_K=BLOCK_K,
        )  # fmt: skip
    return ids, logprob
