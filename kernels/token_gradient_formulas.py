"""The per-token ingredients of dlogits.  Every quantity is [T].

With ``p = exp(z - lse)``, per-token upstream g and ``w = 1 + 2 * z_loss_weight * lse``::

    dz_v = g * (p_v * w - (1 - label_smoothing) [v = label] - label_smoothing / V_all)

is split as ``dz = scale * D + uniform`` so that D holds numbers near 1 whatever g is (g may be
1e-9, which half precision flushes) and needs no g, so that it can be stored in forward::

    D_v = exp(z_v - reference)      D_label = label_value

D that is made in backward may have the scale inside, see ``folded``; then nothing else needs it.

The label's own column is computed from the sum over the *other* columns: ``p_label - 1`` would
cancel for a confident token, ``-others * exp(reference - lse)`` does not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.kernels.token_loss_formulas import FAR, LossTerms, TokenStats


class RowGradient(NamedTuple):
    """``dz = scale * D + uniform``, D as ``dlogits`` writes it from the other three.

    scale (None is 1) and uniform include ``logit_scale``, as the gradient by ``hidden @ weight.T``
    does; the gradient by the bias takes it out again.
    """

    scale: Tensor | None
    reference: Tensor
    label_value: Tensor
    affine: tuple[Tensor, ...]
    uniform: Tensor | None

    def folded(self) -> "RowGradient":
        """The same ``dz`` with the scale inside D. Not for fp16, which would flush it."""
        if self.scale is None:
            return self
        return self._replace(
            scale=None,
            label_value=self.scale * self.label_value,
            affine=tuple(self.scale * x for x in self.affine) or (self.scale,),
        )


class MetricGradients(NamedTuple):
    """Upstream gradients of the metrics, each [T] or None."""

    lse: Tensor | None
    logprob: Tensor | None
    entropy: Tensor | None

    def any(self) -> bool:
        return any(g is not None for g in self)


def label_value(stats: TokenStats, reference: Tensor, terms: LossTerms) -> Tensor:
    """Return D at the label's column, relative to ``reference``; free of the upstream gradient."""
    change = stats.reference - reference
    value = -stats.others * change.exp()
    if terms.has_excess:
        excess = 2 * terms.z_loss_weight * stats.lse + terms.label_smoothing
        w = _z_loss_factor(stats.lse, terms.z_loss_weight)
        value = value + excess * (stats.log_total + change).exp() / w
    return value * softcap_grad(stats.label_logit, terms.softcap)


def token_dloss(
    like: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    norm: Tensor | None,
    dloss: Tensor | None,
    terms: LossTerms,
) -> Tensor:
    """Return [T]: the gradient that reaches each token's unweighted loss, 0 where ignored."""
    total = torch.ones_like(like)
    if dloss is not None:
        total = total * dloss
    if token_weight is not None:
        total = total * token_weight
    if norm is not None:
        total = total / norm
    return total.where(labels != terms.ignore_index, 0.0)


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
    dloss = token_dloss(stats.others, labels, token_weight, norm, dloss, terms) * terms.logit_scale
    reference = stats.lse if from_lse else stats.reference
    change = reference - stats.reference
    w = _z_loss_factor(stats.lse, terms.z_loss_weight)
    smoothing = terms.label_smoothing
    return RowGradient(
        scale=dloss * w * (change - stats.log_total).exp(),
        reference=reference,
        label_value=label_value(stats, reference, terms),
        affine=(),
        uniform=-smoothing / terms.vocab_size * dloss if smoothing else None,
    )


def row_gradient_with_metrics(
    stats: TokenStats,
    dloss: Tensor,
    metrics: MetricGradients,
    entropy: Tensor | None,
    terms: LossTerms,
) -> RowGradient:
    """Split the gradient of loss and metrics, where no one factor is common to a row.

    ``dloss`` comes from ``token_dloss``. With ``x_v = z_v - reference``,
    ``D_v = exp(x_v) * (a + b * x_v) + u`` has the upstream gradients inside::

        d lse = p_v    d logprob = [v = label] - p_v    d entropy = -p_v * (z_v - lse + entropy)
    """
    zero = torch.zeros_like(dloss)
    dlse = zero if metrics.lse is None else metrics.lse
    dlogprob = zero if metrics.logprob is None else metrics.logprob
    dentropy = zero if metrics.entropy is None else metrics.entropy
    log_total, lse = stats.log_total, stats.lse
    centre = zero if entropy is None else entropy - log_total

    w = 1 + 2 * terms.z_loss_weight * lse
    p_scale = (-log_total).exp()
    others = stats.others * p_scale  # 1 - p_label
    uniform = -terms.label_smoothing / terms.vocab_size * dloss
    value = (
        -others * (dloss * w - dlogprob)
        + dloss * (2 * terms.z_loss_weight * lse + terms.label_smoothing)
        + stats.logprob.exp() * (dlse - dentropy * (stats.label_above.clamp_min(FAR) + centre))
        + uniform
    )
    return RowGradient(
        scale=torch.full_like(dloss, terms.logit_scale),
        reference=stats.reference,
        label_value=value * softcap_grad(stats.label_logit, terms.softcap),
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
