"""The matrix D of a window of columns (``formulas.py``), from hidden and weight.

One GEMM, ``hidden @ weight.T``, in a persistent grid; its epilogue turns each tile of logits into a
tile of D. ``at_ids`` writes the labels' elements, one of each row, here and in cached windows.

T = tokens, V = columns of the window, H = hidden size.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.ids.at_ids import write_at_ids
from flce_dist.kernels.logits.launching import tile_launch
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.logits.tile import inverse_temperatures, logits_tile
from flce_dist.kernels.primitives import (
    FAR,
    computed,
    exp,
    softcap_slope,
    store_tile,
    tile_coordinates,
)


@triton.jit(do_not_specialize=["T"])
def _dlogits_kernel(
    hidden, weight, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 (global ids)
    reference_ptr, a_ptr, b_ptr, u_ptr,  # in:  [T] fp32 each
    out,  # out: [T, V]; like hidden and weight a descriptor if TMA, else a pointer
    T, V, H,
    strides, stride_out_t,  # the tuples are those of ShardLogits
    scalars,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
):  # fmt: skip
    """A program computes every num_programs-th tile, all columns but the labels'."""
    ignore_index = scalars.ignore_index
    softcap = scalars.softcap
    SCALED: tl.constexpr = a_ptr is not None and b_ptr is None
    num_t = tl.cdiv(computed(scalars.n_counted, T), BLOCK_T)
    num_v = tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_t * num_v, tl.num_programs(0), flatten=True):
        pid_t, pid_v = tile_coordinates(tile, num_t, num_v, GROUP_T)
        start_t = pid_t * BLOCK_T
        start_v = pid_v * BLOCK_V
        offs_t = start_t + tl.arange(0, BLOCK_T)
        mask_t = offs_t < T
        # Loaded before the GEMM, which hides their latency.
        counted = tl.load(labels_ptr + offs_t, mask=mask_t, other=ignore_index) != ignore_index
        reference = tl.load(reference_ptr + offs_t, mask=mask_t, other=0.0)
        if SCALED:
            scale = tl.load(a_ptr + offs_t, mask=mask_t, other=0.0)
        z = logits_tile(
            hidden, weight, bias_ptr, start_t, start_v, T, V, H,
            strides, scalars, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip

        x = tl.where(counted[:, None], z - reference[:, None], -float("inf"))
        d = exp(x)
        if SCALED:
            d *= scale[:, None]
        if b_ptr is not None:
            a = tl.load(a_ptr + offs_t, mask=mask_t, other=0.0)
            b = tl.load(b_ptr + offs_t, mask=mask_t, other=0.0)
            u = tl.load(u_ptr + offs_t, mask=mask_t, other=0.0)
            # x is -inf where a bias of -inf bans a column, and 0 * -inf would be NaN.
            d = d * (a[:, None] + b[:, None] * tl.maximum(x, FAR)) + u[:, None]
        if softcap is not None:
            d *= softcap_slope(z, softcap, inverse_temperatures(scalars, offs_t, mask_t))
        if b_ptr is not None or softcap is not None:
            d = tl.where(counted[:, None], d, 0.0)  # these factors may be NaN
        store_tile(out, d, start_t, start_v, T, V, stride_out_t, BLOCK_T, BLOCK_V, TMA)


def dlogits(
    logits: ShardLogits, reference: Tensor, label_value: Tensor,
    affine: tuple[Tensor, ...], *, out: Tensor,
) -> None:  # fmt: skip
    """Write ``out[t, v] = (exp(x) * (a + b * x) + u) * softcap'(z)`` with ``x = z - reference``;
    at the label's column ``label_value[t]``, in ignored rows 0.

    reference and label_value are [T] fp32. ``affine`` holds a, b and u, each [T] fp32 and finite in
    ignored rows; or a alone, for b = u = 0; or nothing, for a = 1 as well. out is [T, V] in
    hidden's dtype with a unit last stride.
    """
    T = logits.T
    V = logits.V
    if T == 0 or V == 0:
        return
    launch = tile_launch(logits, out)
    _dlogits_kernel[launch.grid](
        *launch.operands(logits), logits.labels,
        reference, *affine, *(None,) * (3 - len(affine)),
        launch.output(out),
        T, V, logits.H,
        logits.strides, out.stride(0),
        logits.scalars,
        **launch.constexprs,
    )  # fmt: skip
    # Written afterwards: T more elements cost less than a select per element of the epilogue.
    first = logits.vocab_start_index
    ignore_index = logits.ignore_index
    write_at_ids(out, logits.labels, None, label_value, first, ignore_index)
