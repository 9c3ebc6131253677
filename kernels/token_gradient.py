"""``row_gradient`` in one pass over [T]; the formulas are explained in ``row_gradient.py``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.primitives import cast, exp, label_columns
from flce_dist.kernels.token_gradient_formulas import RowGradient
from flce_dist.kernels.token_loss import (
    label_value_of,
    log_total_of,
    z_loss_factor,
)
from flce_dist.kernels.token_loss_formulas import LossTerms, TokenStats


@triton.jit
def _row_gradient_kernel(
    labels_ptr, token_weight_ptr, norm_ptr, dloss_ptr,  # in:  [T] int64, [T] fp32, [], [] or [T]
    label_logit_ptr, reference_ptr, others_ptr,  # in:  [T] fp32 each
    scale_ptr, label_value_ptr, uniform_ptr, lse_ptr,  # out: [T] fp32 each
    T, stride_dloss,
    ignore_index, logit_scale, softcap, label_smoothing, z_loss_weight, smoothing_share,
    HAS_WEIGHT: tl.constexpr, HAS_NORM: tl.constexpr, HAS_DLOSS: tl.constexpr,
    HAS_EXCESS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_UNIFORM: tl.constexpr,
    FROM_LSE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = offs_t < T
    counted = tl.load(labels_ptr + offs_t, mask=mask, other=ignore_index) != ignore_index
    label_logit = tl.load(label_logit_ptr + offs_t, mask=mask, other=0.0)
    reference = tl.load(reference_ptr + offs_t, mask=mask, other=0.0)
    others = tl.load(others_ptr + offs_t, mask=mask, other=0.0)
    dloss = tl.full((BLOCK_T,), logit_scale, tl.float32)
    if HAS_DLOSS:
        cells = offs_t.to(tl.int64) * stride_dloss  # a column of [T, V] passes 2**31 at 16k x 128k
        dloss *= tl.load(dloss_ptr + cells, mask=mask, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        dloss *= tl.load(token_weight_ptr + offs_t, mask=mask, other=0.0)
    if HAS_NORM:
        dloss /= tl.load(norm_ptr)
    dloss = tl.where(counted, dloss, 0.0)

    log_total = log_total_of(others, label_logit - reference)
    lse = reference + log_total
    scale = dloss * z_loss_factor(lse, z_loss_weight)
    value = label_value_of(
        others, lse, log_total, label_logit, label_smoothing, z_loss_weight, softcap,
        HAS_EXCESS, HAS_SOFTCAP,
    )  # fmt: skip
    if FROM_LSE:  # D = exp(z - lse) has the factor that scale has otherwise
        value *= exp(-log_total)
        tl.store(lse_ptr + offs_t, lse, mask=mask)
    else:
        scale *= exp(-log_total)
    tl.store(scale_ptr + offs_t, scale, mask=mask)
    tl.store(label_value_ptr + offs_t, value, mask=mask)
    if HAS_UNIFORM:
        tl.store(uniform_ptr + offs_t, -smoothing_share * dloss, mask=mask)


@triton.jit
def _write_label_kernel(
    labels_ptr, value_ptr,  # in:  [T] int64, [T] fp32
    cells_ptr,  # out: [T, V], only the labels' cells
    T, V, stride_t, vocab_start_index, ignore_index,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column, _ = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
    value = tl.load(value_ptr + offs_t, mask=offs_t < T, other=0.0)
    cell = offs_t.to(tl.int64) * stride_t + column  # T * V passes 2**31 at 16k x 128k
    value = cast(value, cells_ptr.dtype.element_ty)
    tl.store(cells_ptr + cell, value, mask=(offs_t < T) & (column >= 0))


def row_gradient(
    stats: TokenStats,
    labels: Tensor,
    token_weight: Tensor | None,
    norm: Tensor | None,
    dloss: Tensor | None,
    terms: LossTerms,
    *,
    from_lse: bool,
) -> RowGradient:
    """Split the gradient of ``sum_t dloss[t] * token_weight[t] * loss[t] / norm``.

    token_weight and dloss are [T] (dloss also a scalar for all), norm a scalar; None is 1. D is
    relative to the reference of stats, or to lse where ``from_lse``. Not for softcap with
    smoothing.
    """
    T = len(labels)
    scale, label_value = torch.empty_like(stats.others), torch.empty_like(stats.others)
    uniform = torch.empty_like(scale) if terms.label_smoothing else None
    lse = torch.empty_like(scale) if from_lse else None
    rows = RowGradient(scale, stats.reference if lse is None else lse, label_value, (), uniform)
    if T == 0:
        return rows
    _row_gradient_kernel[(-(-T // 128),)](
        labels, token_weight, norm, dloss,
        stats.label_logit, stats.reference, stats.others,
        scale, label_value, uniform, lse,
        T, dloss.stride(0) if dloss is not None and dloss.dim() else 0,
        terms.ignore_index, terms.logit_scale, terms.softcap or 1.0,
        terms.label_smoothing, terms.z_loss_weight, terms.label_smoothing / terms.vocab_size,
        HAS_WEIGHT=token_weight is not None,
        HAS_NORM=norm is not None,
        HAS_DLOSS=dloss is not None,
        HAS_EXCESS=terms.has_excess,
        HAS_SOFTCAP=terms.softcap is not None,
        HAS_UNIFORM=uniform is not None,
        FROM_LSE=from_lse,
        BLOCK_T=128,
    )  # fmt: skip
    return rows


def write_label_value(
    out: Tensor, labels: Tensor, value: Tensor, *, vocab_start_index: int, ignore_index: int
) -> None:
    """Write ``out[t, labels[t] - vocab_start_index] = value[t]`` where that column exists.

    out is [T, V], value [T]; rows of ignored tokens stay.
    """
    T, V = out.shape
    if T == 0 or V == 0:
        return
    _write_label_kernel[(-(-T // 128),)](
        labels, value,
        out,
        T, V, out.stride(0), vocab_start_index, ignore_index,
        BLOCK_T=128,
    )  # fmt: skip
