"""``row_gradient`` of ``formulas.py``, in one pass over T tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.primitives import exp
from flce_dist.kernels.rows.formulas import LossTerms, RowGradient, TokenStats
from flce_dist.kernels.rows.token_loss import label_value_of, log_total_of, z_loss_factor


@triton.jit(do_not_specialize=["T"])
def _row_gradient_kernel(
    labels_ptr, token_weight_ptr, norm_ptr, dloss_ptr,  # in:  [T] int64, [T] fp32, [], [] or [T]
    inverse_temperature_ptr,  # in:  [T] fp32
    label_logit_ptr, reference_ptr, others_ptr,  # in:  [T] fp32 each
    scale_ptr, label_value_ptr, uniform_ptr, lse_ptr,  # out: [T] fp32 each
    T, stride_dloss,
    scalars,  # of LossTerms
    HAS_EXCESS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_T tokens. D is relative to lse if there is a pointer to it."""
    ignore_index, logit_scale, softcap, label_smoothing, z_loss_weight, smoothing_share = scalars
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = offs_t < T
    counted = tl.load(labels_ptr + offs_t, mask=mask, other=ignore_index) != ignore_index
    label_logit = tl.load(label_logit_ptr + offs_t, mask=mask, other=0.0)
    reference = tl.load(reference_ptr + offs_t, mask=mask, other=0.0)
    others = tl.load(others_ptr + offs_t, mask=mask, other=0.0)
    dloss = tl.full((BLOCK_T,), logit_scale, tl.float32)
    if dloss_ptr is not None:
        # T * V passes 2**31 at 16k x 128k: dloss may be a column of such a matrix.
        offs_dloss = offs_t.to(tl.int64) * stride_dloss
        dloss *= tl.load(dloss_ptr + offs_dloss, mask=mask, other=0.0).to(tl.float32)
    if token_weight_ptr is not None:
        dloss *= tl.load(token_weight_ptr + offs_t, mask=mask, other=0.0)
    if norm_ptr is not None:
        dloss /= tl.load(norm_ptr)
    inverse = 1.0
    if inverse_temperature_ptr is not None:
        inverse = tl.load(inverse_temperature_ptr + offs_t, mask=mask, other=1.0)
        dloss *= inverse
    dloss = tl.where(counted, dloss, 0.0)

    log_total = log_total_of(others, label_logit - reference)
    lse = reference + log_total
    scale = dloss * z_loss_factor(lse, z_loss_weight)
    value = label_value_of(
        others, lse, log_total, label_logit, label_smoothing, z_loss_weight, softcap, inverse,
        HAS_EXCESS,
    )  # fmt: skip
    if lse_ptr is not None:  # D = exp(z - lse) contains the factor that is otherwise in scale
        value *= exp(-log_total)
        tl.store(lse_ptr + offs_t, lse, mask=mask)
    else:
        scale *= exp(-log_total)
    tl.store(scale_ptr + offs_t, scale, mask=mask)
    tl.store(label_value_ptr + offs_t, value, mask=mask)
    if uniform_ptr is not None:
        tl.store(uniform_ptr + offs_t, -smoothing_share * dloss, mask=mask)


def row_gradient(
    stats: TokenStats, labels: Tensor, token_weight: Tensor | None,
    norm: Tensor | None, dloss: Tensor | None, terms: LossTerms, *, from_lse: bool,
    inverse_temperature: Tensor | None = None,
) -> RowGradient:  # fmt: skip
    """Split the gradient of ``sum_t dloss[t] * token_weight[t] * loss[t] / norm``; None is 1.

    dloss is [T] or a scalar. D is relative to the reference of stats, or to lse if ``from_lse``.
    Smoothing inside D needs ``row_gradient_with_metrics`` instead.
    """
    (T,) = labels.shape
    scale = torch.empty_like(stats.others)
    label_value = torch.empty_like(stats.others)
    uniform = torch.empty_like(scale) if terms.label_smoothing else None
    lse = torch.empty_like(scale) if from_lse else None
    rows = RowGradient(scale, stats.reference if lse is None else lse, label_value, (), uniform)
    if T == 0:
        return rows
    _row_gradient_kernel[(-(-T // 128),)](
        labels, token_weight, norm, dloss,
        inverse_temperature,
        stats.label_logit, stats.reference, stats.others,
        scale, label_value, uniform, lse,
        T, dloss.stride(0) if dloss is not None and dloss.dim() else 0,
        terms.scalars,
        HAS_EXCESS=terms.has_excess, BLOCK_T=128,
    )  # fmt: skip
    return rows
