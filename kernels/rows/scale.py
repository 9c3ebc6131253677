"""A tensor times a factor on the device: one of all elements, or one of each row.

T = tokens (rows), N = columns, or all elements of a tensor.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels import tuning
from flce_dist.kernels.primitives import cast
from flce_dist.kernels.tuning import next_power_of_2


@triton.jit
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
        number = tl.zeros((BLOCK,), tl.int64) + block  # V * H passes 2**31 at 524k x 4k
        offs = number * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < N, other=0.0).to(tl.float32)
        tl.store(out_ptr + offs, cast(x * factor, out_ptr.dtype.element_ty), mask=offs < N)


def scale(x: Tensor, factor: Tensor, *, out: Tensor) -> None:
    """Write ``out = x * factor``, both contiguous, factor a scalar on the device.

    out may be x: a factor of 1 then costs no traffic.
    """
    N = x.numel()
    block = 8192
    if N:
        _, programs = tuning.device_arch(x.device)
        _scale_kernel[(min(8 * programs, -(-N // block)),)](
            x, factor,
            out,
            N,
            IN_PLACE=out.data_ptr() == x.data_ptr(), BLOCK=block, num_warps=8,
        )  # fmt: skip


@triton.jit
def _scale_rows_kernel(
    x_ptr, scale_ptr, labels_ptr, u_ptr, row_ptr,  # in:  [T, N], [T], [T] int64, [T], [T, N]
    out_ptr,  # out: [T, N]
    N,
    stride_x_t, stride_x_n, stride_row_t, stride_out_t,
    ignore_index,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program scales BLOCK_N columns of one row."""
    # T * N passes 2**31 at 524k x 4k, along either dimension: x may be column-major.
    t = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    counted = tl.load(labels_ptr + t) != ignore_index
    mask_n = offs_n < N
    mask_x = offs_n < tl.where(counted, N, 0)
    x = tl.load(x_ptr + t * stride_x_t + offs_n * stride_x_n, mask=mask_x, other=0.0)
    scaled = x.to(tl.float32)
    if scale_ptr is not None:
        scaled *= tl.load(scale_ptr + t)
    if u_ptr is not None:
        row = tl.load(row_ptr + t * stride_row_t + offs_n, mask=mask_n, other=0.0)
        scaled += tl.load(u_ptr + t) * row.to(tl.float32)
    scaled = cast(tl.where(counted, scaled, 0.0), out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * stride_out_t + offs_n, scaled, mask=mask_n)


def scale_rows(
    x: Tensor, scale: Tensor | None, labels: Tensor, *,
    ignore_index: int, plus: tuple[Tensor, Tensor] | None = None, out: Tensor,
) -> None:  # fmt: skip
    """Write ``out[t] = scale[t] * x[t] (+ u[t] * row[t])``, 0 where the token is ignored.

    x is [T, N], out [T, N] with a unit last stride, or x itself. scale [T] is fp32, None is 1;
    ``plus`` holds u [T] fp32 and row, contiguous: [T, N], or [N] fp32 for all tokens. Rows of x of
    ignored tokens are not read: they may hold NaN.
    """
    T, N = x.shape
    if T == 0 or N == 0:
        return
    BLOCK_N = min(4096, next_power_of_2(N))
    stride_row_t = N if plus is not None and plus[1].dim() == 2 else 0
    _scale_rows_kernel[(T, -(-N // BLOCK_N))](
        x, scale, labels, *(plus or (None, None)),
        out,
        N,
        *x.stride(), stride_row_t, out.stride(0),
        ignore_index,
        BLOCK_N=BLOCK_N, num_warps=8,
    )  # fmt: skip
