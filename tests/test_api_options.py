"""Every option, alone and combined, under every schedule and reduction, against fp64."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from flce_dist.schedules.choose import choose_schedule
from tests.parallel_problem import plan_sizes
from tests.problems import (
    DTYPES,
    METRICS,
    Upstream,
    both,
    check,
    make_inputs,
    metric_upstream,
    pairwise,
    per_token_upstream,
    poisoned_memory,
)

T, V, H, PADDING = 70, 270, 40, 23  # windows of 64 or 128 columns, chunks of 64 tokens
REDUCTIONS = ("none", "sum", "mean")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "all smoothing": {"label_smoothing": 1.0},
    "z-loss": {"z_loss_weight": 1e-2},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.37},
    "negative scale": {"logit_scale": -1.3},
    "padded": {"padded": True},
    "smoothing, z-loss": {"label_smoothing": 0.2, "z_loss_weight": 1e-2},
    "smoothing, padded": {"label_smoothing": 0.2, "padded": True},
    "softcap, z-loss, scale": {"softcap": 3.0, "z_loss_weight": 1e-2, "logit_scale": 0.7},
    "softcap, smoothing": {"softcap": 3.0, "label_smoothing": 0.2},
    "everything": {
        "softcap": 4.0, "label_smoothing": 0.2, "z_loss_weight": 1e-2, "logit_scale": 0.7,
        "padded": True,
    },
}  # fmt: skip

SCHEDULES: dict[str, tuple[str, int | None]] = {  # and columns that the budget holds
    "recompute": ("recompute", None),
    "cached": ("cached", None),
    "partly cached": ("cached", 180),
    "auto": ("auto", None),
    "auto, small": ("auto", 130),
    "in_forward": ("in_forward", None),
    "in_forward, chunks": ("in_forward", 1),
    "in_forward, lent": ("in_forward", 200),  # memory of dweight, but not in fp16
}

UPSTREAM: dict[str, tuple[str, ...]] = {  # results that a gradient reaches
    "loss alone": ("loss",),
    "loss": ("loss",),
    "lse": ("loss", "lse"),
    "logprob": ("logprob",),
    "entropy": ("loss", "entropy"),
    "metrics": METRICS,
    "everything": ("loss", *METRICS),
}


@pytest.fixture(autouse=True)
def small_windows_and_chunks() -> Iterator[None]:
    with plan_sizes(tile=64, min_window=64, max_window=128, most_recomputed=0.4, first_lent=64):
        yield


def refused(options: str, schedule: str, reduction: str, upstream: str) -> bool:
    """Combinations that are refused, as test_checks.py holds."""
    name = SCHEDULES[schedule][0]
    capped_smoothing = {"softcap", "label_smoothing"} <= OPTIONS[options].keys()
    not_scalar = reduction == "none" or UPSTREAM[upstream] != ("loss",)
    return (name == "in_forward" and not_scalar) or (
        name in ("cached", "in_forward") and capped_smoothing
    )


def schedule_of(name: str, itemsize: int) -> dict[str, Any]:
    schedule, columns = SCHEDULES[name]
    budget = None if columns is None else columns * T * max(2, itemsize)
    return {"schedule": schedule, "max_logits_bytes": budget}


def cases(
    schedules: Iterable[str], upstreams: Iterable[str], *others: Iterable[Any]
) -> list[tuple[Any, ...]]:
    every = itertools.product(OPTIONS, schedules, REDUCTIONS, upstreams, *others)
    return pairwise(case for case in every if not refused(*case[:4]))


@poisoned_memory()
def check_case(
    options: str, schedule: str, reduction: str, upstream: str,
    dtype: torch.dtype, H: int, impl: str,
) -> None:  # fmt: skip
    inputs, kwargs = make_inputs(T, V, H, dtype, bias=True, token_weight=True), {**OPTIONS[options]}
    if kwargs.pop("padded", False):
        kwargs["vocab_size"] = V - PADDING
        inputs.labels[inputs.labels >= V - PADDING] = 0
        for x in (inputs.weight, inputs.bias):  # may hold anything: an uninitialised embedding does
            x[V - PADDING :] = torch.nan  # type: ignore[index]
    reached = UPSTREAM[upstream]
    dloss = per_token_upstream(T) if reduction == "none" else -1.7
    dmetrics = metric_upstream(T, *(name for name in reached if name != "loss"))
    check(
        inputs, Upstream(dloss if "loss" in reached else None, dmetrics), impl=impl,
        reduction=reduction, with_metrics=upstream != "loss alone", **kwargs,
        **schedule_of(schedule, dtype.itemsize),
    )  # fmt: skip


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_the_budgets_make_the_plans_they_are_meant_to(itemsize: int) -> None:
    def planned(name: str) -> Any:
        rows = H * itemsize, H * max(4, itemsize)
        sizes: dict[str, Any] = {"T": T, "V": V, "itemsize": itemsize, "dweight_row_bytes": rows}
        return choose_schedule(**sizes, **schedule_of(name, itemsize))

    assert planned("recompute").cached_v == 0
    assert planned("cached").cached_v == V
    assert (planned("partly cached").cached_v, planned("partly cached").window_v) == (64, 64)
    assert (planned("auto, small").cached_v, planned("auto, small").window_v) == (64, 64)
    assert planned("in_forward, chunks").chunks() == [(0, 64), (64, 70)]
    assert planned("in_forward, lent").lending and not planned("in_forward").lending


@pytest.mark.parametrize(
    ("options", "schedule", "reduction", "upstream", "dtype"),
    cases(SCHEDULES, UPSTREAM, [*DTYPES, torch.float64]),
    ids=str,
)
def test_eager(
    options: str, schedule: str, reduction: str, upstream: str, dtype: torch.dtype
) -> None:
    check_case(options, schedule, reduction, upstream, dtype, H, impl="eager")


@pytest.mark.parametrize(
    ("options", "schedule", "reduction", "upstream", "dtype", "H"),
    cases(
        ["recompute", "cached", "partly cached", "in_forward, chunks", "in_forward, lent"],
        ["loss alone", "loss", "everything"],
        DTYPES,
        [37, 64],  # by pointers and by descriptors
    ),
    ids=str,
)
def test_triton(
    options: str, schedule: str, reduction: str, upstream: str, dtype: torch.dtype, H: int
) -> None:
    check_case(options, schedule, reduction, upstream, dtype, H, impl="triton")


@both
@pytest.mark.parametrize("T", [0, 1, 3, 129])
@pytest.mark.parametrize("V", [1, 7, 507])
def test_shapes(V: int, T: int, impl: str) -> None:
    for name in SCHEDULES if impl == "eager" else ("recompute", "cached"):
        inputs = make_inputs(T, V, 123 if impl == "eager" else 16, bias=True)
        options = {"z_loss_weight": 1e-2, "with_metrics": True, **schedule_of(name, 4)}
        check(inputs, Upstream(2.0), impl=impl, **options)
