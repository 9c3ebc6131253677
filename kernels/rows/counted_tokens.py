"""Which tokens count, and what is needed of them.  T_all = tokens, T = how many are computed."""

import torch
from torch import Tensor

from flce_dist.torch_private.devices import assert_soon


def counts(labels: Tensor, token_weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return [T_all] bool: which tokens have a label, and a weight that is not 0."""
    counted = labels != ignore_index
    return counted if token_weight is None else counted & (token_weight != 0)


def counted_tokens(
    labels: Tensor, token_weight: Tensor | None, T: int, *, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return ``(places, labels, token_weight)`` of T tokens, all that count first, in order, and
    how many these are, a scalar int32.

    labels are [T_all] int64, token_weight [T_all] fp32. Tokens that do not count get
    ``ignore_index`` and 0. places are [T] int64, none twice. If more than T tokens count an
    assertion on the device fails, whose error arrives with the next synchronisation.
    """
    counted = counts(labels, token_weight, ignore_index)
    t = torch.arange(len(labels), device=labels.device)
    ordinal = counted.cumsum(0)
    to = torch.where(counted, ordinal - 1, len(labels) - 1 - t + ordinal)
    assert_soon((ordinal <= T).all(), "max_counted must be at least the tokens that count")
    places = torch.empty_like(t).scatter_(0, to, t)[:T]
    labels = labels.where(counted, ignore_index)[places]
    if token_weight is not None:
        token_weight = token_weight.where(counted, 0.0)[places]
    return places, labels, token_weight, counted.sum(dtype=torch.int32)
