"""Each token's ids in order.  T = tokens, K = ids of each."""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.ids import token_ids
from flce_dist.kernels.ids.token_ids import TokenIds
from flce_dist.kernels.tuning import next_power_of_2

_SORTED_AT_ONCE = 1024  # ids of a program


@triton.jit(do_not_specialize=["T"])
def _sorted_rows_kernel(
    ids_ptr,  # in:  [T, K] int64
    sorted_ptr, token_ptr, place_ptr,  # out: [T * K] int64 each
    T, K,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program sorts BLOCK_T rows, by keys whose low bits are the column: repetitions in order."""
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    mask = (t < T) & (k < K)
    key = tl.load(ids_ptr + t * K + k, mask=mask, other=0) * BLOCK_K + k
    key = tl.sort(tl.where(mask, key, (1 << 63) - 1), dim=1)
    place = t * K + (key & (BLOCK_K - 1))
    # Not from the keys, in which an id far beyond the vocabulary may look like a good one.
    tl.store(sorted_ptr + t * K + k, tl.load(ids_ptr + place, mask=mask, other=0), mask=mask)
    tl.store(place_ptr + t * K + k, place, mask=mask)
    tl.store(token_ptr + t * K + k, t + k * 0, mask=mask)


def sorted_ids(ids: Tensor, offsets: Tensor, vocab_size: int) -> TokenIds:
    """``sorted_ids`` of ``token_ids.py``; short rows [T, K] take one launch."""
    if ids.dim() == 1 or ids.shape[1] > _SORTED_AT_ONCE // 4:
        return token_ids.sorted_ids(ids, offsets, vocab_size)
    T, K = ids.shape
    BLOCK_K = next_power_of_2(K)
    in_order, token, place = ids.new_empty(3, ids.numel())
    if ids.numel():
        BLOCK_T = _SORTED_AT_ONCE // BLOCK_K
        _sorted_rows_kernel[(-(-T // BLOCK_T),)](
            ids,
            in_order, token, place,
            T, K,
            BLOCK_T=BLOCK_T, BLOCK_K=BLOCK_K,
        )  # fmt: skip
    return TokenIds(in_order, offsets, token, place)
