"""A tensor times a number that lies on the device, in one pass and with one rounding."""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.primitives import cast

_BLOCK = 4096


@triton.jit
def _scale_kernel(
    x_ptr, factor_ptr,  # in:  [N], []
    out_ptr,  # out: [N]
    N,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # V * H passes 2**31
    factor = tl.load(factor_ptr).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, cast(x * factor, out_ptr.dtype.element_ty), mask=offs < N)


def scale(x: Tensor, factor: Tensor, *, out: Tensor) -> None:
    """Write ``out = x * factor``; x and out are contiguous and of one shape, factor is a scalar."""
    N = x.numel()
    if N:
        _scale_kernel[(-(-N // _BLOCK),)](x, factor, out, N, BLOCK=_BLOCK, num_warps=8)
