"""What branches of a training run leave, and how they differ from exact ones on the same data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

EXACT = "exact"

Curve = dict[int, float]
"""Values by step after the branching."""


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
    """Validation loss minus that of "exact" in the same stretch: its mean over stretches."""

    head: str
    step: int
    mean: float
    standard_error: float | None  # None of one stretch
    n: int  # stretches


def gaps(branches: list[Branch]) -> dict[str, dict[int, Curve]]:
    """Return the differences from "exact" by head, stretch and step, where both are finite."""
    curves = {(branch.head, branch.stretch): _validation(branch) for branch in branches}
    found: dict[str, dict[int, Curve]] = {}
    for (head, stretch), mine in curves.items():
        exact = curves.get((EXACT, stretch), {})
        gap = {step: mine[step] - exact[step] for step in mine if step in exact}
        if head != EXACT and gap:
            found.setdefault(head, {})[stretch] = gap
    return found


def differences(branches: list[Branch]) -> list[Difference]:
    """Return the mean difference of each head at each step, over stretches that have both."""
    found = []
    for head, stretches in gaps(branches).items():
        for step in sorted({step for gap in stretches.values() for step in gap}):
            values = [gap[step] for gap in stretches.values() if step in gap]
            n = len(values)
            error = stdev(values) / math.sqrt(n) if n > 1 else None
            found.append(Difference(head, step, fmean(values), error, n))
    return found


def _validation(branch: Branch) -> Curve:
    return {
        step: loss
        for step, loss in zip(branch.steps, branch.validation, strict=True)
        if loss is not None and math.isfinite(loss)
    }
