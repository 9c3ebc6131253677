"""Formulas: the per-token factors of dlogits, [T] each, from statistics and upstream gradients.

``token_gradient.py`` and ``token_loss.py`` apply ``row_gradient`` and ``label_value`` in Triton,
and ``dlogits.py`` builds D. With ``p = exp(z - lse)``, upstream gradient g of a token and
``w = 1 + 2 * z_loss_weight * lse``::

    dz_v = g * (p_v * w - (1 - label_smoothing) [v = label] - label_smoothing / V_all)

is split as ``dz = scale * D + uniform``. D does not contain g, so it is near 1 in size for any g
(1e-9, for example, would be flushed in half precision) and can be stored in forward::

    D_v = exp(z_v - reference)      D_label = label_value

The label's own column follows from the sum over the *other* columns: ``p_label - 1`` would cancel
for a confident token, ``-others * exp(reference - lse)`` does not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.kernels.rows.token_loss_formulas import FAR, LossTerms, TokenStats


class RowGradient(NamedTuple):
    """``dz = scale * D + uniform``, with D as ``dlogits`` writes it from the other three.

    scale (None is 1) and uniform contain ``logit_scale / temperature``, as the gradient by
    ``hidden @ weight.T`` does; the gradient by the bias divides by ``logit_scale``.
    """

    scale: Tensor | None
    reference: Tensor
    label_value: Tensor
    affine: tuple[Tensor, ...]
    uniform: Tensor | None

    def folded(self) -> "RowGradient":
        """The same ``dz`` with the scale inside D. Not for fp16: small scales would become 0."""
        if self.scale is None:
            return self
        return self._replace(
            scale=None,
            label_value=self.scale * self.label_value,
            affine=tuple(self.scale * x for x in self.affine) or (self.scale,),
        )

    def balanced(self, largest: Tensor) -> "RowGradient":
        """The same ``dz`` with D near 1 in size, for fp16, in which 6e-8 is next to 0.

        ``largest`` [T] is the largest factor of D by absolute value. What moves into the scale is a
        power of two, so nothing is rounded.
        """
        size = power_of_two(largest)
        return self._replace(
            scale=size if self.scale is None else self.scale * size,
            label_value=self.label_value / size,
            affine=tuple(x / size for x in self.affine),
        )


def power_of_two(x: Tensor) -> Tensor:
    """Return the largest normal power of two up to x >= 0, fp32; of 0 the least, of NaN inf."""
    exponents = 0x7F800000
    power = x.contiguous().view(torch.int32).bitwise_and(exponents).view(torch.float32)
    return power.clamp_min(torch.finfo(torch.float32).tiny)


def label_value(
    stats: TokenStats, reference: Tensor, terms: LossTerms, inverse_temperature: Tensor | None
) -> Tensor:
    """Return D at the label's column, relative to ``reference``."""
    change = stats.reference - reference
    value = -stats.others * change.exp()
    if terms.has_excess:
        excess = 2 * terms.z_loss_weight * stats.lse + terms.label_smoothing
        w = _z_loss_factor(stats.lse, terms.z_loss_weight)
        value = value + excess * (stats.log_total + change).exp() / w
    return value * softcap_grad(stats.label_logit, terms.softcap, inverse_temperature)


def token_dloss(
    like: Tensor, labels: Tensor, token_weight: Tensor | None,
    norm: Tensor | None, dloss: Tensor | None, terms: LossTerms,
) -> Tensor:  # fmt: skip
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
    stats: TokenStats, labels: Tensor, token_weight: Tensor | None,
    norm: Tensor | None, dloss: Tensor | None, terms: LossTerms, *, from_lse: bool,
    inverse_temperature: Tensor | None = None,
) -> RowGradient:  # fmt: skip
    dloss = token_dloss(stats.others, labels, token_weight, norm, dloss, terms) * terms.logit_scale
    dloss = dloss if inverse_temperature is None else dloss * inverse_temperature
    reference = stats.lse if from_lse else stats.reference
    change = reference - stats.reference
    w = _z_loss_factor(stats.lse, terms.z_loss_weight)
    smoothing = terms.label_smoothing
    return RowGradient(
        scale=dloss * w * (change - stats.log_total).exp(),
        reference=reference,
        label_value=label_value(stats, reference, terms, inverse_temperature),
        affine=(),
        uniform=-smoothing / terms.vocab_size * dloss if smoothing else None,
    )


def row_gradient_with_metrics(
    stats: TokenStats, dloss: Tensor, dmetrics: Sequence[Tensor | None], entropy: Tensor | None,
    terms: LossTerms, inverse_temperature: Tensor | None, *, balances: bool,
) -> RowGradient:  # fmt: skip
    """Split the gradient of loss and metrics, where a row of ``dz`` has no common factor.

    If it ``balances``, as fp16 needs, D is near 1 in size; else it has that of upstream gradients.

    ``dloss`` comes from ``token_dloss``; ``dmetrics`` are those of lse, logprob and entropy. With
    ``x_v = z_v - reference``, ``D_v = exp(x_v) * (a + b * x_v) + u`` contains them::

        d lse = p_v    d logprob = [v = label] - p_v    d entropy = -p_v * (z_v - lse + entropy)

    b is that of the entropy, u of smoothing with a softcap, which is not the same in each column.
    """
    zero = torch.zeros_like(dloss)
    dlse, dlogprob, dentropy = (zero if g is None else g for g in dmetrics)
    log_total, lse = stats.log_total, stats.lse
    centre = zero if entropy is None else entropy - log_total

    w = 1 + 2 * terms.z_loss_weight * lse
    p_scale = (-log_total).exp()
    others = stats.others * p_scale  # 1 - p_label
    slope = torch.full_like(dloss, terms.logit_scale)
    if inverse_temperature is not None:
        slope = slope * inverse_temperature
    uniform = -terms.label_smoothing / terms.vocab_size * dloss
    in_d = uniform if terms.label_smoothing and terms.softcap is not None else zero
    value = (
        -others * (dloss * w - dlogprob)
        + dloss * (2 * terms.z_loss_weight * lse + terms.label_smoothing)
        + stats.logprob.exp() * (dlse - dentropy * (stats.label_above.clamp_min(FAR) + centre))
        + in_d
    )
    of_p = dloss * w + dlse - dlogprob
    affine: tuple[Tensor, ...] = ((of_p - dentropy * centre) * p_scale,)
    if dmetrics[2] is not None or in_d is uniform:
        affine = (*affine, -dentropy * p_scale, in_d)
    rows = RowGradient(
        scale=slope,
        reference=stats.reference,
        label_value=value * softcap_grad(stats.label_logit, terms.softcap, inverse_temperature),
        affine=affine,
        uniform=slope * uniform if terms.label_smoothing and in_d is not uniform else None,
    )
    if not balances:
        return rows
    return rows.balanced(torch.stack([value, of_p, dentropy, in_d]).abs().amax(0))


def _z_loss_factor(lse: Tensor, z_loss_weight: float) -> Tensor:
    """``1 + 2 * z_loss_weight * lse``, kept off 0 because it divides ``label_value``."""
    w = 1 + 2 * z_loss_weight * lse
    return torch.where(w.abs() < 1e-6, 1e-6, w)


def softcap_grad(
    z: Tensor, softcap: float | None, inverse_temperature: Tensor | None
) -> Tensor | float:
    """Derivative of the softcap, from its value over the temperature, ``z``."""
    if softcap is None:
        return 1.0
    cap = softcap if inverse_temperature is None else softcap * inverse_temperature
    return 1.0 - (z / cap).square()
