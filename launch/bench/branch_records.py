"""What branches of a training run leave, and how they differ from exact ones on the same data."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

EXACT = "exact"

Curve = dict[int, float]
"""Losses by step after the branching, or by where a band of labels begins."""


@dataclass(frozen=True)
class Branch:
    """A continuation of the run with one head over one stretch of text.

    A number that is not finite is None in a file.

    Attributes:
        stretch: from 0.
        steps: after the branching, at which the validation losses are.
        training: mean losses of the steps since the validation before.
        by_frequency: of the last validation, see ``Validation``.
        shares: what ``filter_eps`` kept and left out, means over all steps.
    """

    stretch: int
    head: str
    steps: list[int]
    validation: Sequence[float | None]
    training: Sequence[float | None]
    by_frequency: list[dict[str, Any]]
    shares: dict[str, float | None]
    seconds: float


@dataclass(frozen=True)
class Difference:
    """Validation loss minus that of "exact" in the same stretch: its mean over stretches.

    Attributes:
        labels_from: where the band of labels begins, by frequency, that the losses are of; None of
            all labels.
    """

    head: str
    step: int
    labels_from: int | None
    mean: float
    standard_error: float | None  # None of one stretch
    n: int  # stretches


def by_step(branch: Branch) -> Curve:
    return _finite(branch.steps, branch.validation)


def by_band(branch: Branch) -> Curve:
    """Return the losses of the last validation."""
    bands = branch.by_frequency
    return _finite([band["from"] for band in bands], [band["loss"] for band in bands])


def gaps(
    branches: list[Branch], losses: Callable[[Branch], Curve] = by_step
) -> dict[str, dict[int, Curve]]:
    """Return the differences from "exact" by head and stretch, where both are finite."""
    curves = {(branch.head, branch.stretch): losses(branch) for branch in branches}
    found: dict[str, dict[int, Curve]] = {}
    for (head, stretch), mine in curves.items():
        exact = curves.get((EXACT, stretch), {})
        gap = {at: mine[at] - exact[at] for at in mine if at in exact}
        if head != EXACT and gap:
            found.setdefault(head, {})[stretch] = gap
    return found


def differences(branches: list[Branch]) -> list[Difference]:
    """Return each head's mean differences, over stretches that have both.

    First of all labels at each step, then of each band of labels at the last step.
    """
    last = branches[0].steps[-1] if branches else 0
    return [
        *(Difference(head, step, None, *mean) for head, step, mean in _means(branches, by_step)),
        *(Difference(head, last, band, *mean) for head, band, mean in _means(branches, by_band)),
    ]


def _means(
    branches: list[Branch], losses: Callable[[Branch], Curve]
) -> Iterator[tuple[str, int, tuple[float, float | None, int]]]:
    """Yield head, step or band, and mean, standard error and number of stretches."""
    for head, stretches in gaps(branches, losses).items():
        for at in sorted({at for gap in stretches.values() for at in gap}):
            values = [gap[at] for gap in stretches.values() if at in gap]
            n = len(values)
            error = stdev(values) / math.sqrt(n) if n > 1 else None
            yield head, at, (fmean(values), error, n)


def _finite(at: Sequence[int], losses: Sequence[float | None]) -> Curve:
    return {
        place: loss
        for place, loss in zip(at, losses, strict=True)
        if loss is not None and math.isfinite(loss)
    }
