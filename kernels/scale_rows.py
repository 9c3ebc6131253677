"""Rows times a number each: hidden before the dweight product, dhidden after its own."""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.primitives import cast


@triton.jit
def _scale_rows_kernel(
    x_ptr, scale_ptr, labels_ptr, u_ptr, row_ptr,  # in:  [T, N], [T], [T] int64, [T], [N]
    out_ptr,  # out: [T, N]
    N, stride_x_t, stride_x_n, stride_out_t, ignore_index,
    HAS_PLUS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)  # T * H passes 2**31 at 524k x 4k
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    counted = tl.load(labels_ptr + t) != ignore_index
    mask_n = offs_n < N
    x = tl.load(x_ptr + t * stride_x_t + offs_n * stride_x_n, mask=mask_n & counted, other=0.0)
    scaled = x.to(tl.float32) * tl.load(scale_ptr + t)
    if HAS_PLUS:
        row = tl.load(row_ptr + offs_n, mask=mask_n, other=0.0)
        scaled += tl.load(u_ptr + t) * row
    scaled = tl.where(counted, scaled, 0.0)
    tl.store(
        out_ptr + t * stride_out_t + offs_n, cast(scaled, out_ptr.dtype.element_ty), mask=mask_n
    )


def scale_rows(
    x: Tensor,
    scale: Tensor,
    labels: Tensor,
    *,
    ignore_index: int,
    plus: tuple[Tensor, Tensor] | None = None,
    out: Tensor,
) -> None:
    """Write ``out[t] = scale[t] * x[t] (+ u[t] * row)``, 0 where the token is ignored.

    x is [T, N], scale [T], out [T, N] with a unit last stride; ``plus`` holds u [T] and row [N],
    fp32. Rows of ignored tokens are not read: they may hold NaN.
    """
    T, N = x.shape
    if T == 0 or N == 0:
        return
    BLOCK_N = min(4096, triton.next_power_of_2(N))
    _scale_rows_kernel[(T, -(-N // BLOCK_N))](
        x, scale, labels, *(plus or (None, None)),
        out,
        N, *x.stride(), out.stride(0), ignore_index,
        HAS_PLUS=plus is not None,
        BLOCK_N=BLOCK_N,
        num_warps=8,
    )  # fmt: skip
