"""``formulas.py`` and D at the labels, in one pass over T tokens."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.logits.exact_sums import load_limbs
from flce_dist.kernels.primitives import (
    cast,
    exp,
    first_reference,
    is_rescued,
    log1p,
    rescued_reference,
    softcap_slope,
)
from flce_dist.kernels.rows.formulas import LabelWindow, LossTerms, TokenStats


@triton.jit
def log_total_of(others, label_above):
    """``lse - reference``: log of the sum of all exponentials, the label's own included."""
    # label_above is exactly 0, or the reference is the maximum of the others, and others >= 1, or
    # all are banned: log1p(-1).
    return log1p(tl.where(label_above == 0.0, others, others - 1 + exp(label_above)))


@triton.jit
def label_value_of(
    others, lse, log_total, label_logit, label_smoothing, z_loss_weight, softcap,
    inverse_temperature, HAS_EXCESS: tl.constexpr,
):  # fmt: skip
    """``label_value`` of ``formulas.py``, relative to the token's reference."""
    value = -others
    if HAS_EXCESS:
        excess = 2 * z_loss_weight * lse + label_smoothing
        value += excess * exp(log_total) / z_loss_factor(lse, z_loss_weight)
    if softcap is not None:
        value *= softcap_slope(label_logit, softcap, inverse_temperature)
    return value


@triton.jit
def z_loss_factor(lse, z_loss_weight):
    """As in ``formulas.py``."""
    w = 1 + 2 * z_loss_weight * lse
    return tl.where(tl.abs(w) < 1e-6, 1e-6, w)


@triton.jit(do_not_specialize=["T", "stride_sums"])
def _token_loss_kernel(
    labels_ptr, token_weight_ptr, inverse_temperature_ptr,  # in:  [T] int64, [T], [T] fp32
    label_logit_ptr, max_ptr, sums_ptr,  # in:  [T], [T] fp32, [rows, T] fp64 limbs
    reference_ptr, loss_ptr, others_ptr,  # out: [T] fp32 each
    sum_ez_ptr, sum_z_ptr,  # out: [T] fp32 each
    window_ptrs,  # out: cached windows [T, W], only the labels' elements
    T, stride_sums,
    window_sizes,  # of each window: global id of its first column, W, stride by t
    scalars,  # of LossTerms
    HAS_EXCESS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_T tokens."""
    ignore_index, _, softcap, label_smoothing, z_loss_weight, smoothing_share = scalars
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = offs_t < T
    label = tl.load(labels_ptr + offs_t, mask=mask, other=ignore_index)
    counted = label != ignore_index
    label_logit = tl.load(label_logit_ptr + offs_t, mask=mask, other=0.0)
    others_max = tl.load(max_ptr + offs_t, mask=mask, other=0.0)
    high, _, low = load_limbs(sums_ptr, stride_sums, offs_t, mask, 2)
    others = (high + low).to(tl.float32)
    tl.store(others_ptr + offs_t, others, mask=mask)
    sums_ptr += 2 * stride_sums
    if sum_ez_ptr is not None:
        high, middle, low = load_limbs(sums_ptr, stride_sums, offs_t, mask, 3)
        tl.store(sum_ez_ptr + offs_t, (high + middle + low).to(tl.float32), mask=mask)
        sums_ptr += 3 * stride_sums

    rescued = is_rescued(label_logit, others_max)
    reference = tl.where(rescued, rescued_reference(label_logit, others_max), label_logit)
    label_above = label_logit - reference
    log_total = log_total_of(others, label_above)
    lse = reference + log_total
    loss = log_total - label_above
    if sum_z_ptr is not None:
        sum_z = tl.load(sums_ptr + offs_t, mask=mask, other=0.0).to(tl.float32)
        tl.store(sum_z_ptr + offs_t, sum_z, mask=mask)
        first = first_reference(label_logit)  # finite, where label_logit may be -inf
        loss = log_total + (reference - first) - smoothing_share * sum_z
        loss -= (1 - label_smoothing + smoothing_share) * (label_logit - first)
    loss += z_loss_weight * lse * lse
    if token_weight_ptr is not None:
        loss *= tl.load(token_weight_ptr + offs_t, mask=mask, other=0.0)
    tl.store(reference_ptr + offs_t, reference, mask=mask)
    tl.store(loss_ptr + offs_t, tl.where(counted, loss, 0.0), mask=mask)
    if len(window_ptrs) > 0:
        inverse = 1.0
        if inverse_temperature_ptr is not None:
            inverse = tl.load(inverse_temperature_ptr + offs_t, mask=mask, other=1.0)
        value = label_value_of(
            others, lse, log_total, label_logit, label_smoothing, z_loss_weight, softcap, inverse,
            HAS_EXCESS,
        )  # fmt: skip
        for i in tl.static_range(len(window_ptrs)):
            first_id, W, stride_t = window_sizes[i]
            column = label - first_id
            is_here = counted & (column >= 0) & (column < W)
            ptrs = window_ptrs[i] + offs_t.to(tl.int64) * stride_t + column
            tl.store(ptrs, cast(value, window_ptrs[i].dtype.element_ty), mask=is_here)


def token_loss(
    labels: Tensor, token_weight: Tensor | None, label_logit: Tensor,
    others_max: Tensor, sums: Tensor, terms: LossTerms, *, with_entropy: bool,
    inverse_temperature: Tensor | None = None, windows: Sequence[LabelWindow] = (),
) -> tuple[TokenStats, Tensor]:  # fmt: skip
    """Return the statistics and the loss of each token, [T] fp32, weighted, and 0 where ignored.

    label_logit, others_max and sums (as ``rescue`` leaves them) are those of all ranks. D at the
    labels, relative to the statistics' reference, is written into ``windows``.
    """
    (T,) = labels.shape
    reference = torch.empty_like(label_logit)
    others = torch.empty_like(label_logit)
    loss = torch.empty_like(label_logit)
    sum_z = torch.empty_like(label_logit) if terms.label_smoothing else None
    sum_ez = torch.empty_like(label_logit) if with_entropy else None
    stats = TokenStats(label_logit, reference, others, others_max, sum_z, sum_ez)
    if T == 0:
        return stats, loss
    _token_loss_kernel[(-(-T // 128),)](
        labels, token_weight, inverse_temperature,
        label_logit, others_max, sums,
        reference, loss, others,
        sum_ez, sum_z,
        tuple(window for _, window in windows),
        T, sums.stride(0),
        tuple((first_id, window.shape[1], window.stride(0)) for first_id, window in windows),
        terms.scalars,
        HAS_EXCESS=terms.has_excess, BLOCK_T=128,
    )  # fmt: skip
    return stats, loss
