"""The per-token ingredients of dlogits.  Every quantity is [T].

With ``p = exp(z - lse)``, per-token upstream g and ``w = 1 + 2 * z_loss_weight * lse``::

    dz_v = g * (p_v * w - (1 - label_smoothing) [v = label] - label_smoothing / V_all)

is split as ``dz = scale * D + uniform`` so that D holds numbers near 1 whatever g is (g may be
1e-9, which half precision flushes) and needs no g, so that it can be stored in forward::

    D_v = exp(z_v - reference)      D_label = label_value

The label's own column is computed from the sum over the *other* columns: ``p_label - 1`` would
cancel for a confident token, ``-others * exp(reference - lse)`` does not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.kernels.merge import TokenStats


class RowGradient(NamedTuple):
    """``dz = scale * D + uniform``, D as ``dlogits`` writes it from the other three."""

    scale: Tensor
    reference: Tensor
    label_value: Tensor
    affine: tuple[Tensor, Tensor, Tensor] | None
    uniform: Tensor | None


class MetricGradients(NamedTuple):
    """Upstream gradients of the metrics, each [T] or None."""

    lse: Tensor | None
    logprob: Tensor | None
    entropy: Tensor | None

    def any(self) -> bool:
        return any(g is not None for g in self)


def label_value(
    stats: TokenStats,
    reference: Tensor,
    softcap: float | None,
    *,
    label_smoothing: float,
    z_loss_weight: float,
) -> Tensor:
    """Return D at the label's column, relative to ``reference``; free of the upstream gradient."""
    change = stats.reference - reference
    value = -stats.others * change.exp()
    if z_loss_weight or label_smoothing:
        excess = 2 * z_loss_weight * stats.lse + label_smoothing
        w = _z_loss_factor(stats.lse, z_loss_weight)
        value = value + excess * (stats.log_total + change).exp() / w
    return value * softcap_grad(stats.label_logit, softcap)


def row_gradient(
    dloss: Tensor,
    stats: TokenStats,
    reference: Tensor,
    softcap: float | None,
    *,
    label_smoothing: float,
    z_loss_weight: float,
    vocab_size: int,
) -> RowGradient:
    """Split the gradient of ``dloss[t] * loss[t]``. Not for softcap with smoothing."""
    w = _z_loss_factor(stats.lse, z_loss_weight)
    return RowGradient(
        scale=dloss * w * (reference - stats.reference - stats.log_total).exp(),
        reference=reference,
        label_value=label_value(
            stats,
            reference,
            softcap,
            label_smoothing=label_smoothing,
            z_loss_weight=z_loss_weight,
        ),
        affine=None,
        uniform=-label_smoothing / vocab_size * dloss if label_smoothing else None,
    )


def row_gradient_with_metrics(
    dloss: Tensor,
    metrics: MetricGradients,
    stats: TokenStats,
    entropy: Tensor | None,
    softcap: float | None,
    *,
    label_smoothing: float,
    z_loss_weight: float,
    vocab_size: int,
) -> RowGradient:
    """Split the gradient of loss and metrics, where no one factor is common to a row.

    With ``x_v = z_v - reference``, ``D_v = exp(x_v) * (a + b * x_v) + u`` has the upstream
    gradients inside and ``scale`` is 1::

        d lse = p_v    d logprob = [v = label] - p_v    d entropy = -p_v * (z_v - lse + entropy)
    """
    zero = torch.zeros_like(dloss)
    dlse = zero if metrics.lse is None else metrics.lse
    dlogprob = zero if metrics.logprob is None else metrics.logprob
    dentropy = zero if metrics.entropy is None else metrics.entropy
    centre = zero if entropy is None else entropy - stats.log_total

    w = 1 + 2 * z_loss_weight * stats.lse
    p_scale = (-stats.log_total).exp()
    others = stats.others * p_scale  # 1 - p_label
    label_above = stats.label_logit - stats.reference
    uniform = -label_smoothing / vocab_size * dloss
    value = (
        -others * (dloss * w - dlogprob)
        + dloss * (2 * z_loss_weight * stats.lse + label_smoothing)
        + stats.logprob.exp() * (dlse - dentropy * (label_above + centre))
        + uniform
    )
    return RowGradient(
        scale=torch.ones_like(dloss),
        reference=stats.reference,
        label_value=value * softcap_grad(stats.label_logit, softcap),
        affine=(
            (dloss * w + dlse - dlogprob - dentropy * centre) * p_scale,
            -dentropy * p_scale,
            uniform,
        ),
        uniform=None,
    )


def _z_loss_factor(lse: Tensor, z_loss_weight: float) -> Tensor:
    """``1 + 2 * z_loss_weight * lse``, kept off 0 because it divides ``label_value``."""
    w = 1 + 2 * z_loss_weight * lse
    return torch.where(w.abs() < 1e-6, 1e-6, w)


def softcap_grad(z: Tensor, softcap: float | None) -> Tensor | float:
    """Derivative of the softcap, from its value ``z``."""
    return 1.0 if softcap is None else 1.0 - (z / softcap).square()
