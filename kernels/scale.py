"""A tensor of N elements times a scalar on the device, in one pass and with one rounding."""

import triton.language as tl
from torch import Tensor

from flce_dist.kernels import tuning
from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.primitives import cast


@Kernel
def _scale_kernel(
    x_ptr, factor_ptr,  # in:  [N], []
    out_ptr,  # out: [N]
    N,
    IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program scales every num_programs-th block."""
    factor = tl.load(factor_ptr).to(tl.float32)
    blocks = tl.cdiv(N, BLOCK)
    if IN_PLACE:
        blocks = tl.where(factor == 1.0, 0, blocks)  # nothing to do; the host cannot know
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        first = tl.zeros((BLOCK,), tl.int64) + block  # V * H passes 2**31 at 524k x 4k
        offs = first * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + offs, cast(x * factor, out_ptr.dtype.element_ty), mask=offs < N)


def scale(x: Tensor, factor: Tensor, *, out: Tensor) -> None:
    """Write ``out = x * factor``, contiguous; out may be x: a factor of 1 then costs no traffic."""
    N, block = x.numel(), 8192
    _, programs = tuning.device_arch(x.device)
    _scale_kernel[(min(8 * programs, -(-N // block)),)](
        x, factor,
        out,
        N,
        IN_PLACE=out.data_ptr() == x.data_ptr(), BLOCK=block, num_warps=8,
    )  # fmt: skip
