"""Write the label's element of each row of D.  T = tokens, V = columns."""

import triton.language as tl
from torch import Tensor

from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.primitives import cast, label_columns


@Kernel
def _write_label_kernel(
    labels_ptr, value_ptr,  # in:  [T] int64, [T] fp32
    out_ptr,  # out: [T, V], only the labels' elements
    T, V,
    stride_t,
    vocab_start_index, ignore_index,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program writes one element of each of BLOCK_T rows."""
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column, _ = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
    value = tl.load(value_ptr + offs_t, mask=offs_t < T, other=0.0)
    offs = offs_t.to(tl.int64) * stride_t + column  # T * V passes 2**31 at 16k x 128k
    value = cast(value, out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs, value, mask=(offs_t < T) & (column >= 0))


def write_label_value(
    out: Tensor, labels: Tensor, value: Tensor, vocab_start_index: int, ignore_index: int
) -> None:
    """Write ``out[t, labels[t] - vocab_start_index] = value[t]`` where that column exists.

    out is [T, V] of any dtype with a unit last stride; labels are [T] int64 global ids, value is
    [T] fp32. Rows of ignored tokens are left alone.
    """
    T, V = out.shape
    if V == 0:
        return
    _write_label_kernel[(-(-T // 128),)](
        labels, value,
        out,
        T, V,
        out.stride(0),
        vocab_start_index, ignore_index,
        BLOCK_T=128,
    )  # fmt: skip
