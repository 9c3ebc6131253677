"""Sums and means of weighted losses, and what a mean divides by."""

from dataclasses import replace

import pytest
import torch

from tests.problems import (
    IGNORE,
    Upstream,
    both,
    check,
    device_of,
    each_schedule,
    make_inputs,
    run_op,
    small,
)

NAN, INF = float("nan"), float("inf")


@both
@each_schedule
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "weights of zero"])
def test_no_token_that_counts_is_an_attached_zero(impl, schedule, reduction, ignored):
    inputs = replace(small(impl), token_weight=torch.zeros(37, device=device_of(impl)))
    options = {"label_smoothing": 0.1, "z_loss_weight": 0.1, "reduction": reduction}
    if ignored:
        inputs = replace(inputs, token_weight=None)
        inputs.labels.fill_(IGNORE)
        inputs.hidden.fill_(torch.nan)
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
