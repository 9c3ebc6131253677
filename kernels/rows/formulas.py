"""Formulas of one token: from its statistics over the whole vocabulary to loss and gradient.

Every quantity is [T]. ``token_loss.py``, ``token_gradient.py`` and ``primitives.py`` have them in
Triton.

**Loss and metrics.** Exponentials are relative to the token's ``reference``, normally its label's
logit: ``e_v = exp(z_v - reference)``, summed over the columns other than the label into ``others``.
Then ``loss = log1p(others)`` and ``1 - p_label = others / (1 + others)`` keep their relative
accuracy for the most confident token, where a log-sum-exp minus a logit would cancel.

**Gradient.** With ``p = exp(z - lse)``, upstream gradient g of a token and
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

# Nats by which a logit may exceed the label's: exp(50) times 262,144 columns does not overflow, and
# exp(-62) * dloss, which undoes it in backward, does not underflow.
RESCUE_ABOVE = 50.0
# Least logit of a label that others can be relative to without losing precision.
LOWEST = -(2.0**20)
_LARGEST_ROOT = 2.0**12  # in D, whose other factors are near 1
FAR = -1e30  # for -inf where x is multiplied by exp(x): 0 * -inf would be NaN


LabelWindow = tuple[int, Tensor]
"""The global id of a window's first column, and D [T, W] of the window."""


class LossTerms(NamedTuple):
    """Options that the loss of a token depends on beside its statistics."""

    label_smoothing: float
    z_loss_weight: float
    vocab_size: int  # of all ranks, without padding
    logit_scale: float
    softcap: float | None
    ignore_index: int

    @property
    def scalars(self) -> tuple[int, float, float | None, float, float, float]:
        smoothing = self.label_smoothing
        share = smoothing / self.vocab_size  # of one column
        return (
            self.ignore_index, self.logit_scale, self.softcap, smoothing, self.z_loss_weight, share
        )  # fmt: skip

    @property
    def has_excess(self) -> bool:
        """Whether more than ``p - 1`` reaches the label's logit."""
        return bool(self.label_smoothing or self.z_loss_weight)


class TokenStats(NamedTuple):
    """Statistics of the whole vocabulary, the same on every rank, [T] fp32 (fp64 for fp64)."""

    label_logit: Tensor
    reference: Tensor
    others: Tensor  # sum of exp(z_v - reference) over columns other than the label
    others_max: Tensor | None = None  # largest logit among those columns; -inf if there is none
    sum_z: Tensor | None = None  # sum of z_v - first_reference over those columns
    sum_ez: Tensor | None = None  # sum of e_v * (z_v - reference) over those columns

    @property
    def label_above(self) -> Tensor:
        """``label_logit - reference``: exactly 0 unless rescued, then down to -inf."""
        return self.label_logit - self.reference

    @property
    def log_total(self) -> Tensor:
        """``lse - reference``, free of the rounding of lse."""
        return (self.others + self.label_above.expm1()).log1p()

    @property
    def lse(self) -> Tensor:
        return self.reference + self.log_total

    @property
    def logprob(self) -> Tensor:
        return self.label_above - self.log_total


def first_reference(label_logit: Tensor) -> Tensor:
    """Return what exponentials are relative to before the maximum is known."""
    return torch.where(label_logit < LOWEST, 0.0, label_logit)


def is_rescued(label_logit: Tensor, others_max: Tensor) -> Tensor:
    return (others_max - label_logit > RESCUE_ABOVE) | (label_logit < LOWEST)


def finite(reference: Tensor) -> Tensor:
    """Return what exponentials are relative to: 0 where all are banned, else -inf - -inf is NaN."""
    return reference.masked_fill(reference == -torch.inf, 0.0)


def rescued_reference(label_logit: Tensor, others_max: Tensor) -> Tensor:
    return finite(torch.maximum(label_logit, others_max))


def pick_reference(label_logit: Tensor, others_max: Tensor) -> Tensor:
    """Return the reference of each token: its label's logit, or the maximum where rescued."""
    maximum = rescued_reference(label_logit, others_max)
    return torch.where(is_rescued(label_logit, others_max), maximum, label_logit)


def loss_of(stats: TokenStats, terms: LossTerms) -> Tensor:
    """Return the losses without weights; undefined for ignored tokens."""
    loss = -stats.logprob
    if terms.label_smoothing:
        assert stats.sum_z is not None
        share = terms.label_smoothing / terms.vocab_size
        # first_reference is finite: a label at -inf makes the loss inf, not NaN.
        first = first_reference(stats.label_logit)
        loss = stats.log_total + (stats.reference - first) - share * stats.sum_z
        loss = loss - (1 - terms.label_smoothing + share) * (stats.label_logit - first)
    if terms.z_loss_weight:
        loss = loss + terms.z_loss_weight * stats.lse.square()
    return loss


def token_entropy(stats: TokenStats) -> Tensor:
    """Return ``-sum_v p_v log p_v``; its terms are non-negative up to rounding."""
    assert stats.sum_ez is not None
    label_above = stats.label_above.clamp_min(FAR)
    # Divided by the total itself: exp(-log_total) would carry log_total's rounding, which
    # log_total then magnifies again.
    total = stats.others + label_above.exp()
    mean_above = (stats.sum_ez + label_above * label_above.exp()) / total
    return stats.log_total - mean_above


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

    def half_folded(self) -> "RowGradient":
        """The same ``dz`` with the root of a large scale inside D, for fp16; see ``root_of_large``.

        Without ``affine`` it is in the reference: ``exp(z - reference)`` is as much larger.
        """
        assert self.scale is not None
        root = root_of_large(self.scale)
        return self._replace(
            scale=self.scale / root,
            reference=self.reference if self.affine else self.reference - root.log(),
            label_value=self.label_value * root,
            affine=tuple(x * root for x in self.affine),
        )


def power_of_two(x: Tensor) -> Tensor:
    """Return the largest normal power of two up to x >= 0, fp32; of 0 the least, of NaN inf."""
    exponents = 0x7F800000
    power = x.contiguous().view(torch.int32).bitwise_and(exponents).view(torch.float32)
    return power.clamp_min(torch.finfo(torch.float32).tiny)


def root_of_large(scale: Tensor) -> Tensor:
    """Return [T], 1 to 2^12: the largest power of two up to the root of a scale, for D in fp16.

    Hidden times all of a loss scale may pass 65,504 where the gradient, with a small D, does not.
    What is left is up to twice the root: hidden may reach 180 at a scale of 2^15, 64 at 2^18. D
    does not get more, since its other factors may be above 1.
    """
    return power_of_two(scale.abs().sqrt()).clamp(1.0, _LARGEST_ROOT)


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
    return value * softcap_slope(stats.label_logit, terms.softcap, inverse_temperature)


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
    raised = reference - stats.reference
    w = _z_loss_factor(stats.lse, terms.z_loss_weight)
    smoothing = terms.label_smoothing
    return RowGradient(
        scale=dloss * w * (raised - stats.log_total).exp(),
        reference=reference,
        label_value=label_value(stats, reference, terms, inverse_temperature),
        affine=(),
        uniform=-smoothing / terms.vocab_size * dloss if smoothing else None,
    )


def row_gradient_with_metrics(
    stats: TokenStats, dloss: Tensor, dmetrics: Sequence[Tensor | None], entropy: Tensor | None,
    terms: LossTerms, inverse_temperature: Tensor | None, *, balances: bool, smooths_in_d: bool,
) -> RowGradient:  # fmt: skip
    """Split the gradient of loss and metrics, where a row of ``dz`` has no common factor.

    If it ``balances``, as fp16 needs, D is near 1 in size; else it has that of upstream gradients.

    ``dloss`` comes from ``token_dloss``; ``dmetrics`` are those of lse, logprob and entropy. With
    ``x_v = z_v - reference``, ``D_v = exp(x_v) * (a + b * x_v) + u`` contains them::

        d lse = p_v    d logprob = [v = label] - p_v    d entropy = -p_v * (z_v - lse + entropy)

    b is that of the entropy, u of smoothing if ``smooths_in_d``: with a softcap it is not the same
    in each column, and where it cancels probabilities the difference is rounded, not these.
    """
    zero = torch.zeros_like(dloss)
    dlse, dlogprob, dentropy = (zero if g is None else g for g in dmetrics)
    log_total = stats.log_total
    lse = stats.lse
    centre = zero if entropy is None else entropy - log_total

    w = 1 + 2 * terms.z_loss_weight * lse
    p_scale = (-log_total).exp()
    others = stats.others * p_scale  # 1 - p_label
    tempered_scale = torch.full_like(dloss, terms.logit_scale)
    if inverse_temperature is not None:
        tempered_scale = tempered_scale * inverse_temperature
    uniform = -terms.label_smoothing / terms.vocab_size * dloss
    in_d = uniform if smooths_in_d else zero
    value = (
        -others * (dloss * w - dlogprob)
        + dloss * (2 * terms.z_loss_weight * lse + terms.label_smoothing)
        + stats.logprob.exp() * (dlse - dentropy * (stats.label_above.clamp_min(FAR) + centre))
        + in_d
    )
    of_p = dloss * w + dlse - dlogprob
    affine: tuple[Tensor, ...] = ((of_p - dentropy * centre) * p_scale,)
    if dmetrics[2] is not None or smooths_in_d:
        affine = (*affine, -dentropy * p_scale, in_d)
    rows = RowGradient(
        scale=tempered_scale,
        reference=stats.reference,
        label_value=value * softcap_slope(stats.label_logit, terms.softcap, inverse_temperature),
        affine=affine,
        uniform=tempered_scale * uniform if terms.label_smoothing and not smooths_in_d else None,
    )
    if not balances:
        return rows
    return rows.balanced(torch.stack([value, of_p, dentropy, in_d]).abs().amax(0))


def _z_loss_factor(lse: Tensor, z_loss_weight: float) -> Tensor:
    """``1 + 2 * z_loss_weight * lse``, kept off 0 because it divides ``label_value``."""
    w = 1 + 2 * z_loss_weight * lse
    return torch.where(w.abs() < 1e-6, 1e-6, w)


def softcap_slope(
    z: Tensor, softcap: float | None, inverse_temperature: Tensor | None
) -> Tensor | float:
    """Return the softcap's derivative from z, the capped logit divided by the temperature."""
    if softcap is None:
        return 1.0
    cap = softcap if inverse_temperature is None else softcap * inverse_temperature
    return 1.0 - (z / cap).square()
