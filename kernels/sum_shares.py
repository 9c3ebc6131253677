"""The sum of all ranks' shares of dhidden for the same tokens, rounded once.

T = tokens of this rank, H = hidden size, P = ranks.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.primitives import cast


@triton.jit
def _sum_shares_kernel(
    own_ptr, others_ptr,  # in:  [T, H], [P - 1, T, H]
    out_ptr,  # out: [T, H]
    T, H,
    RANK: tl.constexpr, P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program adds BLOCK_H columns of one token, over ranks 0 to P - 1."""
    t = tl.program_id(0).to(tl.int64)  # T * H passes 2**31 at 524k x 4k
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    acc = tl.zeros((BLOCK_H,), tl.float32)
    for rank in tl.static_range(P):
        if rank == RANK:
            share_ptr = own_ptr + t * H
        else:
            share_ptr = others_ptr + ((rank - (rank > RANK)) * tl.cast(T, tl.int64) + t) * H
        acc += tl.load(share_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * H + offs_h, cast(acc, out_ptr.dtype.element_ty), mask=mask_h)


def sum_shares(own: Tensor, others: Tensor, rank: int, *, out: Tensor) -> None:
    """Write the sum of all ranks' shares, taken in fp32 and in rank order.

    own, which is ``rank``'s, and out are [T, H], others [P - 1, T, H]: contiguous, of one dtype.
    """
    T, H = own.shape
    if T == 0 or H == 0:
        return
    BLOCK_H = min(4096, triton.next_power_of_2(H))
    _sum_shares_kernel[(T, -(-H // BLOCK_H))](
        own, others,
        out,
        T, H,
        RANK=rank, P=others.shape[0] + 1, BLOCK_H=BLOCK_H,
        num_warps=8,
    )  # fmt: skip
