"""Formulas: from the statistics of T tokens over the whole vocabulary to their loss and metrics.

``token_loss.py`` and ``primitives.py`` have them in Triton. Every quantity is [T].

Exponentials are relative to the token's ``reference``, normally its label's logit:
``e_v = exp(z_v - reference)``, summed over the columns other than the label into ``others``. Then
``loss = log1p(others)`` and ``1 - p_label = others / (1 + others)`` keep their relative accuracy
for the most confident token, where a log-sum-exp minus a logit would cancel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Nats by which a logit may exceed the label's: exp(50) times 262,144 columns does not overflow, and
# exp(-62) * dloss, which undoes it in backward, does not underflow.
RESCUE_ABOVE = 50.0
# Least logit of a label that others can be relative to without losing precision.
LOWEST = -(2.0**20)
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


def rescued_reference(label_logit: Tensor, others_max: Tensor) -> Tensor:
    """Return the maximum, or 0 where all are banned: an exponential of -inf - -inf is NaN."""
    maximum = torch.maximum(label_logit, others_max)
    return maximum.masked_fill(maximum == -torch.inf, 0.0)


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
