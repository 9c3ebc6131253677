"""Losses and gradients of tokens: their weights, reductions and upstream gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.outcomes import assert_same
from tests.problems import (
    IGNORE,
    METRICS,
    Upstream,
    both,
    check,
    device_of,
    each_dtype,
    each_schedule,
    make_inputs,
    per_token_upstream,
    run_op,
    small,
    with_logits,
)

NAN, INF = float("nan"), float("inf")


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
    upstream = Upstream(1e-25 * per_token_upstream(37))
    check(small(impl, dtype=dtype), upstream, impl=impl, schedule=schedule, reduction="none")


def test_an_upstream_gradient_of_nan_in_an_ignored_row_does_not_leak():
    inputs = small("eager")
    ignored = inputs.labels == IGNORE
    right, spoilt = (torch.ones(37).masked_fill(ignored, x) for x in (0.0, torch.nan))
    for metrics in ((), METRICS):
        expected, found = (
            run_op(inputs, Upstream(g, dict.fromkeys(metrics, g)), impl="eager", reduction="none")
            for g in (right, spoilt)
        )
        assert_same(found, expected)
        assert all(expected[name].any() for name in ("dhidden", "dweight", "dbias"))


@both
@each_dtype
@each_schedule
def test_confident_tokens_keep_relative_accuracy(impl, schedule, dtype):
    """Where ``lse - z_label`` and ``p_label - 1`` cancel, in fp64 too: hence a closed form."""
    margins = torch.arange(2.0, 62.0, 4.0)
    T, V = len(margins), 70
    labels = torch.arange(T) * 4
    at_label = F.one_hot(labels, V).bool()
    inputs = with_logits(at_label * margins[:, None], labels, dtype)
    options: dict[str, Any] = {"impl": impl, "schedule": schedule, "reduction": "sum"}
    results = run_op(inputs, Upstream(), with_metrics=True, **options)

    others = (V - 1) * (-margins.double()).exp()
    loss, p_other = others.log1p(), others / (1 + others) / (V - 1)
    assert ((-results["logprob"] - loss).abs() <= 1e-5 * loss).all()
    expected = torch.where(at_label, -(V - 1) * p_other[:, None], p_other[:, None])
    eps = torch.finfo(dtype).eps
    if dtype == torch.float16:
        # dlogits are p itself, as accurate as fp16 holds it; what is cached was bf16.
        expected = expected.where(expected.abs() >= torch.finfo(dtype).tiny, 0.0)
        eps = eps if schedule == "recompute" else torch.finfo(torch.bfloat16).eps
    error = (results["dweight"].T - expected).abs() / expected.abs()
    assert error[expected != 0].max() <= 2 * eps + 1e-5


@both
@each_schedule
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "weights of zero"])
def test_no_token_that_counts_is_an_attached_zero(impl, schedule, reduction, ignored):
    inputs = small(impl)
    options = {"label_smoothing": 0.1, "z_loss_weight": 0.1, "reduction": reduction}
    if ignored:
        inputs.labels.fill_(IGNORE)
        inputs.hidden.fill_(torch.nan)
    else:
        inputs = replace(inputs, token_weight=torch.zeros(37, device=device_of(impl)))
    results = run_op(inputs, Upstream(), impl=impl, schedule=schedule, **options)
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


@both
@pytest.mark.parametrize("schedule", ["cached", "in_forward"])
@pytest.mark.parametrize(("weights", "total", "mean"), [
    ((2.0, -1.0, -1.0), None, INF),  # of a loss far from 0
    ((1e300, 1e300, 1e300), INF, NAN),
    ((1.0, NAN, 1.0), NAN, NAN),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_token_weights_at_the_edge(impl, schedule, weights, total, mean):
    """What the formula comes to in fp32; a fourth token is ignored, with its weight."""
    inputs = make_inputs(4, 20, 16, ignored=0.0)
    inputs.hidden[0] *= 20
    inputs.labels[0], inputs.labels[3] = int((inputs.hidden[0] @ inputs.weight.T).argmin()), IGNORE
    inputs = replace(inputs, token_weight=torch.tensor([*weights, NAN], dtype=torch.float64))
    options = {"impl": impl, "schedule": schedule}
    losses = {x: run_op(inputs, Upstream(), reduction=x, **options) for x in ("sum", "mean")}
    assert losses["sum"]["loss"].item() == pytest.approx(total, nan_ok=True) or total is None
    assert losses["mean"]["loss"].item() == pytest.approx(mean, nan_ok=True)
    assert all((outcome["dhidden"][3] == 0).all() for outcome in losses.values())
    assert not losses["mean"]["dhidden"][:3].isfinite().any()
