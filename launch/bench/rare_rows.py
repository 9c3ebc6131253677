"""What filtered gradients cost rows by how frequent they are: errors of dweight and Adam's updates.

T tokens of a batch, V = whole vocabulary, H hidden size. The gradients of every run are compared
row by row with fp64. An update is ``m_hat / (sqrt(v_hat) + eps)`` after one step of Adam for each
batch, all at the same weights; the exact one has fp64 gradients. Bias correction makes both moments
weighted means over the batches: of 8, the first counts 0.70 times as much in v as the last, and
0.48 times in m.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from flce_dist import frequency_order
from flce_dist.launch.bench.config import RunSpec
from flce_dist.launch.bench.problem import DTYPES, Problem, make_truth
from flce_dist.launch.bench.trained_head import (
    Part,
    TrainedHead,
    differentiated,
    dropped,
    make_part,
)

BUCKETS = (0, 256, 1024, 4096, 16384, 65536)
"""Ranks by frequency at which buckets of rows begin."""
BETAS, ADAM_EPS = (0.9, 0.95), 1e-8


@dataclass(frozen=True)
class RowsRecord:
    """A run on the rows of one bucket; p50 and p90 are quantiles over rows."""

    impl: str
    schedule: str | None
    filter_eps: float | None
    T: int
    H: int
    V: int
    dtype: str
    batches: int
    first: int  # rank by frequency
    last: int
    # In the first batch:
    label_share: float  # of the bucket's rows, those that are labels
    rank_one_share: float  # those that no block of tokens keeps; 0 without filter_eps
    error_p50: float  # |g - exact g| / |exact g|
    error_p90: float
    cosine_p50: float
    # After all batches:
    update_error_p50: float
    update_cosine_p50: float
    update_ratio_p50: float  # |u| / |exact u|

    @property
    def name(self) -> str:
        schedule: Any = self.schedule or "auto"
        return RunSpec(self.impl, schedule, filter_eps=self.filter_eps).name


class Adam:
    """The moments of Adam, in fp32, and the update that they make."""

    def __init__(self, like: Tensor):
        self.m, self.v = (torch.zeros_like(like, dtype=torch.float32) for _ in BETAS)
        self.steps = 0

    def step(self, gradient: Tensor) -> None:
        gradient, (beta1, beta2) = gradient.float(), BETAS
        self.m.lerp_(gradient, 1 - beta1)
        self.v.lerp_(gradient.square(), 1 - beta2)
        self.steps += 1

    def update(self) -> Tensor:
        m_hat, v_hat = (
            x / (1 - beta**self.steps) for x, beta in zip((self.m, self.v), BETAS, strict=True)
        )
        return m_hat / (v_hat.sqrt() + ADAM_EPS)


def measure(batches: list[TrainedHead], thresholds: tuple[float, ...]) -> list[RowsRecord]:
    """Return the records of each bucket, with the vocabulary in order of frequency.

    Holds two fp32 moments [V, H] of ``2 + 2 * len(thresholds)`` runs.
    """
    head = batches[0]
    exact, moments = Adam(head.weight), dict[RunSpec, Adam]()
    rows = dict[RunSpec, dict[str, Tensor]]()
    never_kept: dict[float | None, Tensor] = {None: torch.zeros(len(head.weight), dtype=torch.bool)}
    for batch in batches:
        problem = make_part(batch, Part(), 1, None).problem
        truth = make_truth(problem, gradients=True).dweight
        assert truth is not None
        exact.step(truth)
        for run, dweight in _gradients(problem, thresholds):
            moments.setdefault(run, Adam(dweight)).step(dweight)
            if batch is head:
                rows[run] = _of_gradients(dweight, truth, problem.labels)
                if run.impl == "dropped":
                    never_kept[run.filter_eps] = ~dweight.any(1)
    wanted = exact.update()
    for run, adam in moments.items():
        error, cosine, ratio = _compared(adam.update(), wanted)
        rows[run] |= {"update_error": error, "update_cosine": cosine, "update_ratio": ratio}
        rows[run]["rank_one"] = never_kept[run.filter_eps]
    return [
        _record(run, head, len(batches), first, chosen, values)
        for first, chosen in _buckets(head.counts)
        for run, values in rows.items()
    ]


def _gradients(problem: Problem, thresholds: tuple[float, ...]) -> Iterator[tuple[RunSpec, Tensor]]:
    """Yield each run with its dweight [V, H]."""
    impl = "triton" if problem.hidden.device.type == "cuda" else "eager"
    ours = [RunSpec(impl, "recompute", filter_eps=eps) for eps in thresholds]
    for run in (RunSpec("torch_eager"), *ours):
        _, (_, dweight), _ = differentiated(problem, run)
        yield run, dweight
    for eps in thresholds:
        _, dweight, _ = dropped(problem, eps)
        yield RunSpec("dropped", filter_eps=eps), dweight


def _of_gradients(dweight: Tensor, truth: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return what one batch says about each row, [V] each."""
    error, cosine, _ = _compared(dweight, truth)
    is_label = labels.bincount(minlength=len(truth)) > 0
    return {"label": is_label, "error": error, "cosine": cosine}


def _compared(x: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's relative error, cosine (0 where ``x`` is 0) and relative norm, [V] fp64."""
    x, exact = x.double(), exact.double()
    norm, wanted = x.norm(dim=1), exact.norm(dim=1)
    cosine = ((x * exact).sum(1) / (norm * wanted)).where(norm > 0, 0.0)
    return (x - exact).norm(dim=1) / wanted, cosine, norm / wanted


def _buckets(counts: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the first rank of each bucket with its rows in the order of frequency."""
    by_rank = counts.cpu().argsort(descending=True, stable=True)
    rows = frequency_order(counts).row_of_token[by_rank]
    for first, end in zip(BUCKETS, (*BUCKETS[1:], len(rows)), strict=True):
        if first < len(rows):
            yield first, rows[first:end]


def _record(
    run: RunSpec, head: TrainedHead, batches: int, first: int, chosen: Tensor,
    values: dict[str, Tensor],
) -> RowsRecord:  # fmt: skip
    def quantile(name: str, q: float = 0.5) -> float:
        return _rounded(of_bucket[name].quantile(q).item())

    of_bucket = {name: x[chosen.to(x.device)].double() for name, x in values.items()}
    (T, H), V = head.hidden.shape, len(head.weight)
    return RowsRecord(
        impl=run.impl,
        schedule=run.schedule if run.is_ours else None,
        filter_eps=run.filter_eps,
        T=T,
        H=H,
        V=V,
        dtype=next(name for name, dtype in DTYPES.items() if dtype == head.hidden.dtype),
        batches=batches,
        first=first,
        last=first + len(chosen) - 1,
        label_share=_rounded(of_bucket["label"].mean().item()),
        rank_one_share=_rounded(of_bucket["rank_one"].mean().item()),
        error_p50=quantile("error"),
        error_p90=quantile("error", 0.9),
        cosine_p50=quantile("cosine"),
        update_error_p50=quantile("update_error"),
        update_cosine_p50=quantile("update_cosine"),
        update_ratio_p50=quantile("update_ratio"),
    )


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")


def table(records: list[RowsRecord]) -> Table:
    first = records[0]
    sizes = f"{first.batches} x T={first.T} H={first.H} V={first.V} {first.dtype}"
    caption = "u: Adam's update; rank one: share of rows that no block keeps"
    made = Table(title=f"rows by frequency: {sizes}", caption=caption)
    for heading in ("ranks", "run"):
        made.add_column(heading, no_wrap=True)
    numbers = {
        "labels": "label_share",
        "rank one": "rank_one_share",
        "error": "error_p50",
        "p90": "error_p90",
        "cosine": "cosine_p50",
        "u error": "update_error_p50",
        "u cosine": "update_cosine_p50",
        "u ratio": "update_ratio_p50",
    }
    for heading in numbers:
        made.add_column(heading, justify="right", no_wrap=True)
    last = None
    for record in records:
        if record.first != last:
            made.add_section()
        ranks = f"{record.first:,} to {record.last:,}" if record.first != last else ""
        last = record.first
        made.add_row(ranks, record.name, *(f"{getattr(record, x):.4f}" for x in numbers.values()))
    return made
