"""What ``verify`` found: merged over ranks, as tables, as a verdict and as JSON."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from flce_dist.launch.process_group import Group, gathered
from flce_dist.launch.verify.cases import METRICS, Case, Shape
from flce_dist.testing import ErrorBudget

COLUMNS = {
    "loss": ("loss",),
    "dhidden": ("dhidden",),
    "dweight": ("dweight",),
    "dbias": ("dbias",),
    "metrics": (*METRICS, "other", "correct", "kept_share", "rank_one_mass"),
    "bits": ("same loss", "same as recompute"),
}
"""Columns of a table and the checks that each shows the worst of."""


@dataclass(frozen=True)
class Record:
    """One case at one dtype and shape: its checks, or the error that kept it from having any."""

    dtype: str
    shape: Shape
    case: Case
    checks: dict[str, ErrorBudget]
    failure: str | None = None

    @property
    def where(self) -> str:
        return f"{self.dtype} {tuple(self.shape)} {self.case.variant.title}, {self.case.name}"

    @property
    def met(self) -> bool:
        return self.failure is None and all(check.met for check in self.checks.values())

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "shape": self.shape._asdict(), "met": self.met}


def worst_of_ranks(records: list[Record], tp_group: Group) -> list[Record]:
    """Merge the records of all ranks, so that all come to one verdict; one small all-gather."""
    if tp_group is None:
        return records
    merged = []
    for ranks in zip(*gathered(records, tp_group), strict=True):
        failures = [f"rank {rank}: {x.failure}" for rank, x in enumerate(ranks) if x.failure]
        names = dict.fromkeys(name for record in ranks for name in record.checks)
        checks = {name: _worst(r.checks[name] for r in ranks if name in r.checks) for name in names}
        failure = failures[0] if failures else None
        merged.append(dataclasses.replace(ranks[0], checks=checks, failure=failure))
    return merged


def worst_case(records: Sequence[Record]) -> str:
    """Return a line about one dtype and shape: the case closest to its budget or beyond it most.

    One that raised is worse than any.
    """
    missed = sum(not record.met for record in records)
    count = f"{_title(records)}: {len(records)} cases, {missed} missed"
    raised = [record for record in records if record.failure is not None]
    if raised:
        return f"{count}; worst: {raised[0].case.variant.title}, {raised[0].case.name} raised"
    checks = [(check, name, r.case) for r in records for name, check in r.checks.items()]
    check, name, case = max(checks, key=lambda item: share_of_budget(item[0]))
    return f"{count}; worst: {name} {_numbers(check)}, {case.variant.title}, {case.name}"


def table(records: Sequence[Record]) -> Table:
    """Return the table of one dtype and shape, with "error / budget" of the worst rank."""
    made = Table(title=f"{_title(records)}: error / budget")
    for heading in ("loss of", "schedule", *COLUMNS):
        made.add_column(heading, no_wrap=True)
    for variant, group in itertools.groupby(records, lambda record: record.case.variant):
        made.add_section()
        name = variant.title
        for record in group:
            cells = [_cell(record, names) for names in COLUMNS.values()]
            if record.failure is not None:
                cells[0] = f"[red]{escape(record.failure.splitlines()[0][:80])}[/]"
            made.add_row(name, record.case.name, *cells)
            name = ""  # once
    return made


def passed(records: Sequence[Record]) -> bool:
    """Whether every case met its budgets, and there was one."""
    return bool(records) and all(record.met for record in records)


def summary(records: list[Record], facts: dict[str, Any]) -> list[str]:
    """Return the misses, if any, and one line with the verdict."""
    lines = []
    for record in records:
        misses = [f"{name} {check}" for name, check in record.checks.items() if not check.met]
        misses += [record.failure] if record.failure else []
        lines += [f"MISS {record.where}: {miss}" for miss in misses]
    met = sum(record.met for record in records)
    verdict = "PASS" if passed(records) else "FAIL"
    names = "flce_dist", "commit", "torch", "triton", "cuda", "nccl", "python"
    versions = ", ".join(f"{name} {facts[name]}" for name in names if facts[name] is not None)
    lines.append(
        f"{verdict}: {met} of {len(records)} cases within budget on "
        f"{facts['ranks']} x {facts['hardware']}; {versions}; {facts['seconds']} s"
    )
    return lines


def _title(records: Sequence[Record]) -> str:
    T, H, V_all = records[0].shape
    return f"{records[0].dtype}, T={T} H={H} V={V_all}"


def _numbers(check: ErrorBudget) -> str:
    return f"{check.error:.1e} / {f'{check.budget:.1e}' if check.budget else 0}"


def _cell(record: Record, names: Iterable[str]) -> str:
    checks = [record.checks[name] for name in names if name in record.checks]
    if not checks:
        return ""
    worst = _worst(checks)
    if worst.met and not worst.budget:
        return "exact"
    text = _numbers(worst)
    return text if worst.met else f"[red]{text}[/]"


def _worst(checks: Iterable[ErrorBudget]) -> ErrorBudget:
    return max(checks, key=share_of_budget)


def share_of_budget(check: ErrorBudget) -> float:
    """Return the error over its budget; inf for NaN, and for an error where none is allowed."""
    if check.error == 0.0:
        return 0.0
    share = check.error / check.budget if check.budget else math.inf
    return math.inf if math.isnan(share) else share
