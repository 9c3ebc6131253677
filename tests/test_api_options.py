"""Every option, alone and combined, under every schedule and reduction, against fp64."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist.op import plan
from tests.problems import (
    METRICS,
    Inputs,
    Upstream,
    check,
    make_inputs,
    metric_upstream,
    pairwise,
    per_token_upstream,
)

HALVES_AND_FP32 = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*HALVES_AND_FP32, torch.float64]

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

SCHEDULES: dict[str, dict[str, Any]] = {
    "recompute": {"schedule": "recompute"},
    "cached": {"schedule": "cached"},
    "partly cached": {"schedule": "cached", "max_logits_bytes": 300 * 4 * 1800},
    "auto": {"schedule": "auto"},
    "auto, small": {"schedule": "auto", "max_logits_bytes": 300 * 4 * 600},
    "in_forward": {"schedule": "in_forward"},
    "in_forward, chunks": {"schedule": "in_forward", "max_logits_bytes": 1},
}

T, V, H = 300, 3000, 40  # 12 windows of 256 columns, 2 chunks of 256 tokens


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budgets above then make several windows."""
    monkeypatch.setattr(plan, "_MIN_WINDOW", 256)
    monkeypatch.setattr(plan, "_MAX_WINDOW", 512)


def refused(options: str, schedule: str, reduction: str) -> bool:
    """Combinations that checks.py refuses; test_check_options.py holds that it does."""
    name = SCHEDULES[schedule]["schedule"]
    capped_smoothing = {"softcap", "label_smoothing"} <= OPTIONS[options].keys()
    return (name == "in_forward" and reduction == "none") or (
        name in ("cached", "in_forward") and capped_smoothing
    )


def grid(
    options: Iterable[str] = OPTIONS,
    schedules: Iterable[str] = SCHEDULES,
    reductions: Iterable[str] = ("none", "sum", "mean"),
) -> list[tuple[str, str, str]]:
    cases = itertools.product(options, schedules, reductions)
    return [case for case in cases if not refused(*case)]


def upstream_for(reduction: str, T: int, **metrics: Tensor) -> Upstream:
    """Per token where the loss is, else a scalar other than 1."""
    return Upstream(per_token_upstream(T) if reduction == "none" else -1.7, metrics)


def inputs_for(
    options: str, dtype: torch.dtype = torch.float32, shape: tuple[int, int, int] = (T, V, H)
) -> tuple[Inputs, dict[str, Any]]:
    """Inputs with bias and token weights, and the options with a padding that fits them."""
    inputs, kwargs = make_inputs(*shape, dtype, bias=True, token_weight=True), {**OPTIONS[options]}
    if kwargs.pop("padded", False):
        kwargs["vocab_size"] = max(1, shape[1] - 199)
        inputs.labels[inputs.labels >= kwargs["vocab_size"]] = 0
    return inputs, kwargs


def test_the_budgets_make_the_plans_they_are_meant_to() -> None:
    def planned(name: str) -> Any:
        budget = {"max_logits_bytes": None, **SCHEDULES[name]}
        return plan.plan(T=T, V=V, itemsize=4, expressible=True, **budget)

    assert planned("recompute").cached_v == 0
    assert planned("cached").cached_v == V
    assert (planned("partly cached").cached_v, planned("partly cached").window_v) == (1280, 512)
    assert (planned("auto, small").cached_v, planned("auto, small").window_v) == (256, 256)
    assert planned("in_forward, chunks").chunks() == [(0, 256), (256, 300)]


@pytest.mark.parametrize(("options", "schedule", "reduction"), pairwise(grid()))
def test_eager_options(options: str, schedule: str, reduction: str) -> None:
    inputs, kwargs = inputs_for(options)
    upstream = upstream_for(reduction, T)
    check(inputs, upstream, reduction=reduction, **kwargs, **SCHEDULES[schedule])


@pytest.mark.parametrize(
    ("options", "schedule", "reduction", "dtype"),
    pairwise(
        (*case, dtype)
        for case in grid(["smoothing, padded", "softcap, z-loss, scale", "everything"])
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
    ),
    ids=str,
)
def test_eager_dtypes(options: str, schedule: str, reduction: str, dtype: torch.dtype) -> None:
    inputs, kwargs = inputs_for(options, dtype, (130, 1500, 40))
    upstream = upstream_for(reduction, 130)
    check(inputs, upstream, reduction=reduction, **kwargs, **SCHEDULES[schedule])


@pytest.mark.parametrize(
    ("options", "schedule", "dtype"),
    pairwise(
        itertools.product(
            ["plain", "smoothing, padded", "softcap, z-loss, scale"], SCHEDULES, DTYPES
        )
    ),
    ids=str,
)
def test_eager_metrics(options: str, schedule: str, dtype: torch.dtype) -> None:
    inputs, kwargs = inputs_for(options, dtype)
    check(inputs, Upstream(0.3), with_metrics=True, **kwargs, **SCHEDULES[schedule])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", ["recompute", "cached", "partly cached"])
@pytest.mark.parametrize(
    ("options", "of"),
    [
        *(("plain", (name,)) for name in METRICS),
        ("plain", METRICS),
        ("softcap", METRICS),
        ("everything", METRICS),
        ("smoothing, z-loss", ("lse", "entropy")),
    ],
)
@pytest.mark.parametrize("through_loss", [True, False], ids=["with loss", "metrics alone"])
def test_eager_metric_gradients(
    options: str, of: tuple[str, ...], schedule: str, dtype: torch.dtype, through_loss: bool
) -> None:
    if refused(options, schedule, "none"):
        schedule = "recompute"
    shape = (130, 1500, 40)
    inputs, kwargs = inputs_for(options, dtype, shape)
    loss = per_token_upstream(shape[0]) if through_loss else None
    upstream = Upstream(loss, metric_upstream(shape[0], *of))
    check(inputs, upstream, reduction="none", **kwargs, **SCHEDULES[schedule])


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("token_weight", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_optional_tensors(impl: str, reduction: str, token_weight: bool, bias: bool) -> None:
    inputs = make_inputs(20, 70, 32, bias=bias, token_weight=token_weight)
    check(inputs, upstream_for(reduction, 20), impl=impl, reduction=reduction)


@pytest.mark.parametrize("T", [0, 1, 3, 129])
@pytest.mark.parametrize("V", [1, 7, 507])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_eager_shapes(schedule: str, V: int, T: int) -> None:
    for H in (1, 123):
        inputs = make_inputs(T, V, H, bias=True)
        check(inputs, Upstream(2.0), with_metrics=True, z_loss_weight=1e-2, **SCHEDULES[schedule])


# The interpreter's cost is per tile (32 x 64 here) and step: few shapes, all of them ragged.


@pytest.mark.parametrize(
    ("case", "dtype", "H"),  # by pointers and by descriptors
    pairwise(
        itertools.product(
            [
                ("plain", "recompute", "none"),
                ("plain", "in_forward", "mean"),
                ("smoothing, padded", "cached", "none"),
                ("softcap, z-loss, scale", "cached", "mean"),
                ("everything", "recompute", "none"),
            ],
            HALVES_AND_FP32,
            [123, 128],
        )
    ),
    ids=str,
)
def test_triton_options(case: tuple[str, str, str], dtype: torch.dtype, H: int) -> None:
    options, schedule, reduction = case
    inputs, kwargs = inputs_for(options, dtype, (37, 270, H))
    upstream = upstream_for(reduction, 37)
    kwargs |= {"reduction": reduction, "impl": "triton", **SCHEDULES[schedule]}
    check(inputs, upstream, **kwargs)


@pytest.mark.parametrize("options", OPTIONS)
def test_triton_each_option(options: str) -> None:
    inputs, kwargs = inputs_for(options, shape=(35, 270, 32))
    for schedule in ("recompute", "cached", "in_forward"):
        if not refused(options, schedule, "sum"):
            kwargs |= {"schedule": schedule, "reduction": "sum", "impl": "triton"}
            check(inputs, Upstream(0.7), **kwargs)


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        ("recompute", torch.float32),
        ("cached", torch.bfloat16),
        ("cached", torch.float32),
        ("auto", torch.float16),
        ("in_forward", torch.bfloat16),
        ("in_forward", torch.float32),
    ],
    ids=str,
)
def test_triton_several_windows_and_chunks(schedule: str, dtype: torch.dtype) -> None:
    """Windows start off the tile grid's first column, chunks off its first row."""
    T, V = (300, 70) if schedule == "in_forward" else (20, 1000)
    inputs = make_inputs(T, V, 32, dtype, bias=True)
    budget = 1 if schedule == "in_forward" else 20 * max(2, dtype.itemsize) * 800
    kwargs: dict[str, Any] = {
        "impl": "triton", "schedule": schedule, "max_logits_bytes": budget,
    }  # fmt: skip
    check(inputs, Upstream(3.0), with_metrics=True, label_smoothing=0.1, **kwargs)


@pytest.mark.parametrize("dtype", HALVES_AND_FP32, ids=str)
@pytest.mark.parametrize("options", ["plain", "everything"])
def test_triton_metric_gradients(options: str, dtype: torch.dtype) -> None:
    inputs, kwargs = inputs_for(options, dtype, (37, 270, 32))
    upstream = Upstream(per_token_upstream(37), metric_upstream(37, *METRICS))
    check(inputs, upstream, impl="triton", reduction="none", schedule="recompute", **kwargs)


@pytest.mark.parametrize("T", [0, 1, 3, 129])
@pytest.mark.parametrize("V", [1, 7, 507])
def test_triton_shapes(V: int, T: int) -> None:
    for schedule in ("recompute", "cached"):
        inputs = make_inputs(T, V, 16, bias=True)
        check(inputs, Upstream(2.0), impl="triton", with_metrics=True, schedule=schedule)
