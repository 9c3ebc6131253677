"""Cases that broke others: accumulation, upstream gradients, ignored tokens, labels."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flce_dist.op import plan
from flce_dist.testing import relative_rms
from tests.oracle import (
    IGNORE,
    METRICS,
    Upstream,
    check,
    device_of,
    make_inputs,
    metric_upstream,
    per_token_upstream,
    run_op,
    run_reference,
)
from tests.problems import (
    assert_same,
    both,
    each_dtype,
    each_schedule,
    poisoned_memory,
    small,
)

# --- accumulation


@each_dtype
def test_dweight_error_does_not_grow_with_the_number_of_chunks(dtype):
    inputs = make_inputs(4096, 40, 16, dtype)
    truth = run_reference(inputs.to(torch.float64), Upstream())["dweight"]

    def error(**kwargs: Any) -> float:
        return relative_rms(run_op(inputs, Upstream(), impl="eager", **kwargs)["dweight"], truth)

    one = error(schedule="in_forward")
    sixteen = error(schedule="in_forward", max_logits_bytes=1)
    assert sixteen <= 1.2 * one + 1e-7
    assert sixteen <= 1.2 * error(schedule="cached") + 1e-7


@each_dtype
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_dhidden_error_does_not_grow_with_the_number_of_windows(schedule, dtype, monkeypatch):
    inputs = make_inputs(16, 4096, 32, dtype)
    truth = run_reference(inputs.to(torch.float64), Upstream())["dhidden"]

    def error(**kwargs: Any) -> float:
        return relative_rms(run_op(inputs, Upstream(), impl="eager", **kwargs)["dhidden"], truth)

    one = error(schedule=schedule)
    monkeypatch.setattr(plan, "_MIN_WINDOW", 256)
    monkeypatch.setattr(plan, "_MAX_WINDOW", 256)
    assert error(schedule=schedule, max_logits_bytes=4096 * 16) <= 1.2 * one + 1e-7


# --- upstream gradients


@both
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_a_token_without_upstream_gradient_has_none(impl, schedule):
    inputs, g = small(impl), per_token_upstream(37)
    results = check(inputs, Upstream(g), impl=impl, reduction="none", schedule=schedule)
    assert (results["dhidden"][g == 0] == 0).all()
    live = (g != 0) & (inputs.labels.cpu() != IGNORE)
    assert (results["dhidden"][live] != 0).any(1).all()


@both
@each_schedule
@pytest.mark.parametrize("g", [0.0, -3.0, 1e-12, 1e6])
def test_a_scalar_upstream_gradient_other_than_1(impl, schedule, g):
    check(small(impl), Upstream(g), impl=impl, schedule=schedule)


@both
@each_schedule
def test_a_loss_scale_keeps_small_fp16_gradients(impl, schedule):
    """Without the scale they would fall below fp16's 6e-8: it must arrive before the rounding."""
    inputs = make_inputs(64 if impl == "triton" else 2048, 100, 32, torch.float16)
    inputs = replace(inputs, weight=(inputs.weight.float() / 256).half())
    check(inputs, Upstream(65536.0), impl=impl, schedule=schedule)


@both
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiny_upstream_gradients_do_not_underflow(impl, schedule, dtype):
    inputs = make_inputs(20, 150, 32, dtype)
    check(inputs, Upstream(1e-25 * per_token_upstream(20)), impl=impl, schedule=schedule,
          reduction="none")  # fmt: skip


def test_an_upstream_gradient_of_nan_in_an_ignored_row_does_not_leak():
    inputs = small("eager")
    g = torch.ones(37).masked_fill(inputs.labels == IGNORE, torch.nan)
    for metrics in ({}, {name: g for name in METRICS}):
        results = run_op(inputs, Upstream(g, metrics), impl="eager", reduction="none")
        assert all(x.isfinite().all() for x in results.values())


# --- ignored tokens


@both
@each_schedule
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_all_tokens_ignored_is_an_attached_zero(impl, schedule, reduction):
    inputs = small(impl)
    inputs.labels.fill_(IGNORE)
    inputs.hidden.fill_(torch.nan)
    results = run_op(
        inputs, Upstream(), impl=impl, schedule=schedule, reduction=reduction,
        label_smoothing=0.1, z_loss_weight=0.1, with_metrics=True,
    )  # fmt: skip
    assert results["loss"] == 0
    assert all((x == 0).all() for x in results.values())


@both
@each_schedule
def test_token_weights_of_zero_are_an_attached_zero(impl, schedule):
    inputs = replace(small(impl), token_weight=torch.zeros(37, device=device_of(impl)))
    results = run_op(inputs, Upstream(), impl=impl, schedule=schedule)
    assert results["loss"] == 0
    assert all((x == 0).all() for x in results.values())


@both
@pytest.mark.parametrize("schedule", ["cached", "in_forward"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_token_weights_of_another_dtype(impl, schedule, dtype):
    """The loss is fp32 all the same. Weights may have either sign, their sum too."""
    inputs = small(impl, token_weight=True)
    assert inputs.token_weight is not None
    weights = (inputs.token_weight - 0.75).to(dtype)
    check(replace(inputs, token_weight=weights), impl=impl, schedule=schedule)


NAN, INF = float("nan"), float("inf")


@both
@pytest.mark.parametrize("schedule", ["cached", "in_forward"])
@pytest.mark.parametrize(
    ("weights", "total", "mean"),
    [
        ((2.0, -1.0, -1.0), None, INF),  # of a loss far from 0
        ((1e300, 1e300, 1e300), INF, NAN),
        ((1.0, NAN, 1.0), NAN, NAN),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_token_weights_at_the_edge(impl, schedule, weights, total, mean):
    """What the formula comes to in fp32; a fourth token is ignored, with its weight."""
    inputs = make_inputs(4, 20, 16, ignored=0.0)
    inputs.hidden[0] *= 20
    inputs.labels[0], inputs.labels[3] = int((inputs.hidden[0] @ inputs.weight.T).argmin()), IGNORE
    inputs = replace(inputs, token_weight=torch.tensor([*weights, NAN], dtype=torch.float64))
    losses = {
        reduction: run_op(inputs, Upstream(), impl=impl, schedule=schedule, reduction=reduction)
        for reduction in ("sum", "mean")
    }
    if total is not None:
        assert torch.equal(losses["sum"]["loss"].nan_to_num(-1), torch.tensor(total).nan_to_num(-1))
    assert torch.equal(losses["mean"]["loss"].nan_to_num(-1), torch.tensor(mean).nan_to_num(-1))
    assert all((outcome["dhidden"][3] == 0).all() for outcome in losses.values())
    assert not losses["mean"]["dhidden"][:3].isfinite().any()


@both
@each_schedule
@pytest.mark.parametrize(
    ("dtype", "garbage"),
    [(torch.float32, 1e30), (torch.bfloat16, torch.nan), (torch.float16, -torch.inf)],
    ids=str,
)
@poisoned_memory()
def test_what_an_ignored_row_holds_does_not_leak(impl, schedule, dtype, garbage):
    inputs = small(impl, token_weight=True).to(dtype)
    dirty = replace(inputs, hidden=inputs.hidden.clone(), token_weight=inputs.token_weight.clone())  # type: ignore[union-attr]
    ignored = inputs.labels == IGNORE
    dirty.hidden[ignored] = garbage
    dirty.token_weight[ignored] = garbage  # type: ignore[index]
    options: dict[str, Any] = {"impl": impl, "schedule": schedule, "label_smoothing": 0.1,
                               "z_loss_weight": 0.1, "with_metrics": True}  # fmt: skip
    results = run_op(dirty, Upstream(2.0), **options)
    assert_same(run_op(inputs, Upstream(2.0), **options), results)
    for name in ("dhidden", *METRICS):
        assert (results[name][ignored.cpu()] == 0).all()


@both
def test_ignored_rows_do_not_leak_through_the_gradients_of_metrics(impl):
    inputs = small(impl)
    inputs.hidden[inputs.labels == IGNORE] = torch.nan
    upstream = Upstream(per_token_upstream(37), metric_upstream(37, *METRICS))
    results = check(inputs.to(torch.device("cpu")), upstream, impl=impl, reduction="none",
                    softcap=5.0)  # fmt: skip
    assert all(x.isfinite().all() for x in results.values())


@both
@each_schedule
@pytest.mark.parametrize("ignore_index", [0, 149, -1])
def test_ignore_index_may_be_a_token_of_the_vocabulary(impl, schedule, ignore_index):
    """Its column still takes part in the softmax of the others."""
    inputs = small(impl, ignored=0.0).to(torch.device("cpu"))
    inputs.labels[::3] = ignore_index
    check(inputs, Upstream(), impl=impl, schedule=schedule, ignore_index=ignore_index,
          label_smoothing=0.1)  # fmt: skip


# --- labels


@both
@each_schedule
def test_int32_labels(impl, schedule):
    inputs = small(impl)
    results = run_op(replace(inputs, labels=inputs.labels.int()), Upstream(), impl=impl,
                     schedule=schedule)  # fmt: skip
    assert_same(run_op(inputs, Upstream(), impl=impl, schedule=schedule), results)


@both
@each_schedule
def test_labels_in_the_first_and_last_column(impl, schedule):
    inputs = small(impl, ignored=0.0).to(torch.device("cpu"))
    inputs.labels[::2], inputs.labels[1::2] = 0, 149
    check(inputs, Upstream(), impl=impl, schedule=schedule, with_metrics=True)
