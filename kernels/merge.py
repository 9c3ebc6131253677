"""From shard statistics to the loss of each token and its gradient's ingredients.  All [T].

Exponentials are relative to the token's ``reference``, normally its label's logit:
``e_v = exp(z_v - reference)``, summed over the columns other than the label into ``others``. Then
``loss = log1p(others)`` and ``1 - p_label = others / (1 + others)`` keep their relative accuracy
for the most confident token, where a log-sum-exp minus a logit would cancel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

RESCUE_ABOVE = 50.0
"""Nats by which a logit may pass the label's before the token's reference becomes the maximum.

fp32 and bf16 overflow at exp(88). exp(50) times 262,144 columns stays far below that, and
``exp(-62) * dloss``, the factor that undoes it in backward, far above the smallest normal number.
"""


class TokenStats(NamedTuple):
    """Statistics of the whole vocabulary, the same on every rank, [T] fp32 (fp64 for fp64)."""

    label_logit: Tensor
    reference: Tensor
    others: Tensor  # sum of exp(z_v - reference) over columns other than the label
    log_total: Tensor  # lse - reference, free of the rounding of lse
    lse: Tensor
    logprob: Tensor
    others_max: Tensor | None  # largest logit among those columns; -inf if there is none
    sum_z: Tensor | None  # sum of z_v - label_logit over those columns
    sum_ez: Tensor | None  # sum of e_v * (z_v - reference) over those columns


def pick_reference(label_logit: Tensor, others_max: Tensor) -> Tensor:
    """Return the reference of each token: its label's logit, or the maximum where that overflows.

    Rows whose reference is not the label's logit are the ones ``rescue`` computes again.
    """
    return torch.where(others_max - label_logit > RESCUE_ABOVE, others_max, label_logit)


def token_stats(
    label_logit: Tensor,
    reference: Tensor,
    others_max: Tensor,
    others: Tensor,
    sum_ez: Tensor | None,
    sum_z: Tensor | None,
) -> TokenStats:
    """Merge the reduced sums into log-sum-exp and log-probability."""
    label_above = label_logit - reference  # exactly 0 unless rescued, then below -50
    log_total = (others + label_above.expm1()).log1p()
    return TokenStats(
        label_logit=label_logit,
        reference=reference,
        others=others,
        log_total=log_total,
        lse=reference + log_total,
        logprob=label_above - log_total,
        others_max=others_max,
        sum_z=sum_z,
        sum_ez=sum_ez,
    )


def token_loss(
    stats: TokenStats, *, label_smoothing: float, z_loss_weight: float, vocab_size: int
) -> Tensor:
    """Return the loss of each token, before its weight. Ignored tokens hold anything."""
    loss = -stats.logprob
    if label_smoothing:
        assert stats.sum_z is not None
        loss = loss - label_smoothing / vocab_size * stats.sum_z
    if z_loss_weight:
        loss = loss + z_loss_weight * stats.lse.square()
    return loss


def token_entropy(stats: TokenStats) -> Tensor:
    """Return ``-sum_v p_v log p_v``, all of its terms non-negative but for rounding."""
    assert stats.sum_ez is not None
    label_above = stats.label_logit - stats.reference
    # Divided by the total itself: exp(-log_total) would carry log_total's rounding, which
    # log_total then magnifies again.
    total = stats.others + label_above.exp()
    mean_above = (stats.sum_ez + label_above * label_above.exp()) / total
    return stats.log_total - mean_above


def write_label(cache: Tensor, labels: Tensor, value: Tensor, *, vocab_start_index: int) -> None:
    """Write ``cache[t, labels[t] - vocab_start_index] = value[t]`` where that column exists.

    cache is [T, W], value [T]. A gather and a scatter of one column per row: no index lists, so
    the host never waits for the device.
    """
    if cache.shape[1] == 0:
        return
    column = labels - vocab_start_index
    owned = (column >= 0) & (column < cache.shape[1])
    column = column.where(owned, 0)[:, None]
    value = value.to(cache.dtype)[:, None]
    if cache.element_size() == 2:
        # As bits: torch's CPU scatter of half floats makes an fp32 copy of its whole destination.
        cache, value = cache.view(torch.int16), value.view(torch.int16)
    cache.scatter_(1, column, value.where(owned[:, None], cache.gather(1, column)))
