"""The sum of what several ranks have computed for the same tokens, rounded once."""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels import tuning
from flce_dist.kernels.primitives import cast


@triton.jit
def _sum_shares_kernel(
    own_ptr, others_ptr,  # in:  [N], [P - 1, N]
    out_ptr,  # out: [N]
    N,
    RANK: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for block in range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
        block = tl.zeros((BLOCK,), tl.int64) + block
        offs = block * BLOCK + tl.arange(0, BLOCK)
        acc = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(P):
            if rank == RANK:
                share_ptr = own_ptr
            else:
                share_ptr = others_ptr + tl.cast(N, tl.int64) * (rank - (rank > RANK))
            acc += tl.load(share_ptr + offs, mask=offs < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + offs, cast(acc, out_ptr.dtype.element_ty), mask=offs < N)


def sum_shares(own: Tensor, others: Tensor, rank: int, *, out: Tensor) -> None:
    """Write the sum of all ranks' shares, taken in fp32 and in their order; own's is ``rank``.

    own and out are [T, H], others [P - 1, T, H]: contiguous and of one dtype.
    """
    N, block = own.numel(), 4096
    if N:
        _, programs = tuning.device_arch(own.device)
        _sum_shares_kernel[(min(8 * programs, -(-N // block)),)](
            own, others,
            out,
            N,
            RANK=rank, P=others.shape[0] + 1, BLOCK=block, num_warps=8,
        )  # fmt: skip
