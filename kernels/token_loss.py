"""From the merged statistics of a token to its loss, in one pass over [T]; and their sum.

The formulas are those of ``merge.py``, where they are explained. T = tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.exact_sums import load_limbs
from flce_dist.kernels.primitives import exp, first_reference, is_rescued, log1p, softcap_slope
from flce_dist.kernels.token_loss_formulas import RESCUE_ABOVE, LossTerms, TokenStats


@triton.jit
def log_total_of(others, label_above):
    """``lse - reference``: log of the sum of all exponentials, the label's own included."""
    # label_above is exactly 0, or the reference is the maximum of the others, and others >= 1.
    return log1p(tl.where(label_above == 0.0, others, others - 1 + exp(label_above)))


@triton.jit
def label_value_of(
    others, lse, log_total, label_logit, label_smoothing, z_loss_weight, softcap,
    HAS_EXCESS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """D at the label's column, see ``row_gradient.label_value``."""
    value = -others
    if HAS_EXCESS:
        excess = 2 * z_loss_weight * lse + label_smoothing
        value += excess * exp(log_total) / z_loss_factor(lse, z_loss_weight)
    if HAS_SOFTCAP:
        value *= softcap_slope(label_logit, softcap)
    return value


@triton.jit
def z_loss_factor(lse, z_loss_weight):
    """``1 + 2 * z_loss_weight * lse``, kept off 0 because it divides."""
    w = 1 + 2 * z_loss_weight * lse
    return tl.where(tl.abs(w) < 1e-6, 1e-6, w)


@triton.jit
def _token_loss_kernel(
    labels_ptr, token_weight_ptr,  # in:  [T] int64, [T] fp32
    label_logit_ptr, max_ptr, sums_ptr,  # in:  [T], [T] fp32, [rows, T] fp64 limbs
    reference_ptr, loss_ptr, label_value_ptr,  # out: [T] fp32 each
    others_ptr, sum_ez_ptr, sum_z_ptr,  # out: [T] fp32 each
    T, stride_sums,
    ignore_index, softcap, label_smoothing, z_loss_weight, smoothing_share,
    ABOVE: tl.constexpr, HAS_WEIGHT: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_EXCESS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = offs_t < T
    counted = tl.load(labels_ptr + offs_t, mask=mask, other=ignore_index) != ignore_index
    label_logit = tl.load(label_logit_ptr + offs_t, mask=mask, other=0.0)
    others_max = tl.load(max_ptr + offs_t, mask=mask, other=0.0)
    high, _, low = load_limbs(sums_ptr, stride_sums, offs_t, mask, 2)
    others = (high + low).to(tl.float32)
    tl.store(others_ptr + offs_t, others, mask=mask)
    sums_ptr += 2 * stride_sums
    if WITH_ENTROPY:
        high, middle, low = load_limbs(sums_ptr, stride_sums, offs_t, mask, 3)
        tl.store(sum_ez_ptr + offs_t, (high + middle + low).to(tl.float32), mask=mask)
        sums_ptr += 3 * stride_sums

    rescued = is_rescued(label_logit, others_max, ABOVE)
    reference = tl.where(rescued, tl.maximum(others_max, label_logit), label_logit)
    label_above = label_logit - reference
    log_total = log_total_of(others, label_above)
    lse = reference + log_total
    loss = log_total - label_above
    if HAS_SMOOTHING:
        sum_z = tl.load(sums_ptr + offs_t, mask=mask, other=0.0).to(tl.float32)
        tl.store(sum_z_ptr + offs_t, sum_z, mask=mask)
        first = first_reference(label_logit)  # finite, where label_logit may be -inf
        loss = log_total + (reference - first) - smoothing_share * sum_z
        loss -= (1 - label_smoothing + smoothing_share) * (label_logit - first)
    loss += z_loss_weight * lse * lse
    if HAS_WEIGHT:
        loss *= tl.load(token_weight_ptr + offs_t, mask=mask, other=0.0)
    tl.store(reference_ptr + offs_t, reference, mask=mask)
    tl.store(loss_ptr + offs_t, tl.where(counted, loss, 0.0), mask=mask)
    value = label_value_of(
        others, lse, log_total, label_logit, label_smoothing, z_loss_weight, softcap,
        HAS_EXCESS, HAS_SOFTCAP,
    )  # fmt: skip
    tl.store(label_value_ptr + offs_t, value, mask=mask)


@triton.jit
def _loss_norm_kernel(
    labels_ptr, token_weight_ptr,  # in:  [T] int64, [T] fp32
    norm_ptr,  # out: [] fp32
    T, ignore_index,
    HAS_WEIGHT: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    weights = tl.zeros((BLOCK_T,), tl.float32)
    nonzero = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, T, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        mask = offs_t < T
        label = tl.load(labels_ptr + offs_t, mask=mask, other=ignore_index)
        weight = tl.full((BLOCK_T,), 1.0, tl.float32)
        if HAS_WEIGHT:
            weight = tl.load(token_weight_ptr + offs_t, mask=mask, other=0.0)
        weight = tl.where(label != ignore_index, weight, 0.0)
        weights += weight
        nonzero |= (weight != 0.0).to(tl.int32)
    norm = tl.sum(weights, axis=0)
    tl.store(norm_ptr, tl.where(tl.max(nonzero, axis=0) > 0, norm, 1.0))


@triton.jit
def _reduce_loss_kernel(
    loss_ptr, norm_ptr,  # in:  [T], [] fp32
    total_ptr,  # out: [] fp32
    T,
    HAS_NORM: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    losses = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, T, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        losses += tl.load(loss_ptr + offs_t, mask=offs_t < T, other=0.0)
    total = tl.sum(losses, axis=0)
    if HAS_NORM:
        total /= tl.load(norm_ptr)
    tl.store(total_ptr, total)


def token_loss(
    labels: Tensor,
    token_weight: Tensor | None,
    label_logit: Tensor,
    others_max: Tensor,
    sums: Tensor,
    terms: LossTerms,
    *,
    with_entropy: bool,
) -> tuple[TokenStats, Tensor, Tensor]:
    """Return ``(stats, loss, label_value)``, each [T] fp32.

    label_logit, others_max and sums (of ``rescue``) are those of the whole vocabulary. loss is
    weighted, and 0 where ignored; label_value is D at the label's column, relative to the reference
    of stats (see ``row_gradient``).
    """
    T = len(labels)
    reference, loss, label_value, others = (torch.empty_like(label_logit) for _ in range(4))
    sum_z = torch.empty_like(label_logit) if terms.label_smoothing else None
    sum_ez = torch.empty_like(label_logit) if with_entropy else None
    stats = TokenStats(label_logit, reference, others, others_max, sum_z, sum_ez)
    if T == 0:
        return stats, loss, label_value
    _token_loss_kernel[(-(-T // 128),)](
        labels, token_weight,
        label_logit, others_max, sums,
        reference, loss, label_value,
        others, sum_ez, sum_z,
        T, sums.stride(0),
        terms.ignore_index, terms.softcap or 1.0,
        terms.label_smoothing, terms.z_loss_weight, terms.label_smoothing / terms.vocab_size,
        ABOVE=RESCUE_ABOVE,
        HAS_WEIGHT=token_weight is not None,
        WITH_ENTROPY=with_entropy,
        HAS_SMOOTHING=sum_z is not None,
        HAS_EXCESS=terms.has_excess,
        HAS_SOFTCAP=terms.softcap is not None,
        BLOCK_T=128,
    )  # fmt: skip
    return stats, loss, label_value


def loss_norm(
    labels: Tensor, token_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return what a mean divides by: the sum of counted tokens' weights, 1 where all are 0."""
    norm = torch.empty((), dtype=dtype, device=labels.device)
    _loss_norm_kernel[(1,)](
        labels, token_weight,
        norm,
        len(labels), ignore_index,
        HAS_WEIGHT=token_weight is not None, BLOCK_T=2048, num_warps=8,
    )  # fmt: skip
    return norm


def reduce_loss(loss: Tensor, norm: Tensor | None) -> Tensor:
    """Return ``loss.sum() / norm``, a scalar; None is 1."""
    total = loss.new_empty(())
    _reduce_loss_kernel[(1,)](
        loss, norm,
        total,
        len(loss),
        HAS_NORM=norm is not None, BLOCK_T=2048, num_warps=8,
    )  # fmt: skip
    return total
