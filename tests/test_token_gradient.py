"""Upstream gradients of any size and sign reach each token, and no other."""

from dataclasses import replace

import pytest
import torch

from tests.problems import (
    IGNORE,
    METRICS,
    Upstream,
    both,
    check,
    each_schedule,
    make_inputs,
    per_token_upstream,
    run_op,
    small,
)


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
