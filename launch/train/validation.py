"""The validation loss, whole and by how frequent the labels are in the training text.

A mean over all labels hides the rare ones: most labels are among a few hundred tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BANDS = (0, 256, 1024, 4096, 16384)
"""Where bands of the vocabulary begin in the order of frequency, which starts at the most frequent
token."""


@dataclass(frozen=True)
class Validation:
    loss: float
    by_frequency: list[dict[str, Any]]
    """Of each band: ``from``, where it begins; ``tokens``, how many labels it holds; ``loss``,
    their mean loss, None if there are none."""

    @classmethod
    def of(cls, sums: Tensor) -> "Validation":
        """Divide ``band_sums`` of all labels; waits for the device."""
        losses, tokens = sums.tolist()
        return cls(
            sum(losses) / sum(tokens),
            [
                {"from": first, "tokens": round(n), "loss": loss / n if n else None}
                for first, loss, n in zip(BANDS, losses, tokens, strict=True)
            ],
        )


def band_of_token(counts: Tensor) -> Tensor:
    """Return each token's band [V_all] int64; ``counts`` [V_all] of the training text."""
    places = counts.argsort(descending=True, stable=True).argsort()
    return torch.bucketize(places, torch.tensor(BANDS[1:]), right=True)


def band_sums(losses: Tensor, bands: Tensor) -> Tensor:
    """Return the sum of the losses and the number of labels in each band, [2, bands] fp64.

    ``losses`` and the labels' ``bands`` are of one shape.
    """
    is_in = bands.flatten() == torch.arange(len(BANDS), device=bands.device)[:, None]
    sums = torch.where(is_in, losses.flatten().double(), 0.0).sum(1)
    return torch.stack([sums, is_in.sum(1).double()])


@contextmanager
def each_token(layer: Any) -> Iterator[None]:
    """Let a layer with head.schedule=in_forward return the loss of each token, for no_grad."""
    keywords = getattr(layer, "loss_keywords", None)
    if keywords is None or keywords["reduction"] == "none":
        yield
        return
    layer.loss_keywords = keywords | {"reduction": "none", "schedule": "auto"}
    try:
        yield
    finally:
        layer.loss_keywords = keywords
