"""temperature: a number or one of each token, with every schedule and option.

Random combinations with all other options, also on ranks that split the tokens, are in
test_api_random_cases.py, checks of tensors in test_checks.py, ranks that disagree in
test_rank_check.py.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import LinearCrossEntropy, linear_cross_entropy, linear_logprob
from flce_dist.arguments.passed import tempered
from tests.filtered_formula import check_filtered, zipf_inputs
from tests.invariant_problem import differing, problem, statistics
from tests.parallel_problem import complaint
from tests.problems import (
    IGNORE,
    Upstream,
    both,
    check,
    compare,
    each_schedule,
    everywhere,
    make_inputs,
    metric_upstream,
    per_token_upstream,
    poisoned_memory,
    run,
    run_op,
)

T, V, H = 37, 150, 32
LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "label_smoothing": 0.1, "z_loss_weight": 0.01, "logit_scale": -1.3},
    "none": {"reduction": "none", "softcap": 3.0, "z_loss_weight": 0.01},
    "metrics": {"reduction": "none", "softcap": 3.0, "logit_scale": 0.7},
    "smoothing": {"reduction": "sum", "softcap": 3.0, "label_smoothing": 0.1},
}
CASES = [  # schedule, dtype, loss, whether of each token
    ("recompute", torch.float32, "metrics", True),
    ("recompute", torch.bfloat16, "smoothing", True),
    ("recompute", torch.float16, "none", False),
    ("cached", torch.float32, "none", True),
    ("cached", torch.bfloat16, "metrics", False),
    ("cached", torch.float16, "sum", True),
    ("in_forward", torch.float32, "sum", False),
    ("in_forward", torch.float16, "mean", True),
]


def upstream_of(loss: str) -> Upstream:
    if LOSSES[loss].get("reduction") != "none":
        return Upstream(0.7)
    metrics = metric_upstream(T, "lse", "logprob", "entropy") if loss == "metrics" else {}
    return Upstream(per_token_upstream(T), metrics)


@everywhere
@pytest.mark.parametrize(("schedule", "dtype", "loss", "one_each"), CASES, ids=str)
def test_against_fp64(schedule, dtype, loss, one_each, impl):
    inputs = make_inputs(T, V, H, dtype, bias=True, token_weight=True, temperature=one_each)
    if not one_each:
        inputs = replace(inputs, temperature=0.6)
    with poisoned_memory():
        check(inputs, upstream_of(loss), impl=impl, schedule=schedule, **LOSSES[loss])


@both
@each_schedule
def test_far_logits(impl, schedule):
    """Low temperatures put most labels so far below the maximum that it becomes the reference."""
    inputs = make_inputs(T, V, H, bias=True)
    for temperature in (0.02, torch.linspace(0.01, 3.0, T), 40.0):
        check(replace(inputs, temperature=temperature), impl=impl, schedule=schedule, softcap=20.0)


def test_the_number_one_needs_no_kernel_of_its_own():
    assert all(tempered(one, torch.arange(4)) is None for one in (1, 1.0))


@both
def test_values_of_a_tensor_concern_their_own_token(impl):
    """0, below and NaN are refused; of ignored tokens nothing is read."""
    inputs = make_inputs(T, V, H, temperature=True)
    assert isinstance(inputs.temperature, Tensor)
    spoilt = inputs.temperature.masked_fill(inputs.labels == IGNORE, torch.nan)
    for schedule in ("recompute", "cached"):
        options: dict[str, Any] = {"schedule": schedule, "reduction": "none", "with_metrics": True}
        expected = run_op(inputs, Upstream(), impl=impl, **options)
        found = run_op(replace(inputs, temperature=spoilt), Upstream(), impl=impl, **options)
        for name in ("loss", "lse", "logprob", "entropy", "dhidden"):
            assert torch.equal(found[name], expected[name]), name
    token = int(inputs.labels.ne(IGNORE).nonzero()[3])
    given = inputs.hidden, inputs.weight, inputs.labels
    for bad in (0.0, 1e-45, -1.0, torch.nan, torch.inf, -torch.inf):
        spoilt[token] = bad
        for options in ({}, {"skip_ignored": True}):
            said = complaint(linear_cross_entropy, *given, temperature=spoilt, impl=impl, **options)
            assert said == (
                "temperature must be finite and above 0 for each token that counts, got 0, "
                f"infinity, NaN or a negative number at token {token}"
            )


def test_scores_refuse_a_temperature_of_a_token_with_ids_alone():
    ids = torch.tensor([[3, 4], [-1, -1], [-1, 5]])
    given = torch.ones(3, H), torch.ones(V, H), ids
    spoilt = torch.tensor([1.0, torch.nan, 2.0])
    assert linear_logprob(*given, temperature=spoilt).logprob.isfinite().all()
    spoilt[2] = 0.0
    assert "negative number at token 2" in complaint(linear_logprob, *given, temperature=spoilt)
    flat = torch.tensor([3, 4, -1, 5])
    spoilt = torch.tensor([1.0, -1.0, 0.0])
    for cuts, said in (([0, 2, 2, 4], "token 2"), ([0, 2, 4, 4], "token 1"), ([0, 4, 4, 4], "")):
        options = {"temperature": spoilt, "offsets": torch.tensor(cuts)}
        text = complaint(linear_logprob, *given[:2], flat, **options)
        assert text.endswith(said) and bool(text) == bool(said)


@pytest.mark.parametrize("value", [0, 0.0, -0.5, math.nan, math.inf, 1e-45, True, None, "1", [1.0]])
def test_numbers_that_are_refused(value):
    given = torch.ones(4, 8), torch.ones(9, 8), torch.arange(4)
    said = complaint(linear_cross_entropy, *given, temperature=value)
    assert said == f"temperature must be a float that is finite and above 0 in fp32, got {value!r}"


@both
@pytest.mark.parametrize("one_each", [False, True])
def test_filtered_gradients_are_as_defined(impl, one_each):
    n = 300 if impl == "eager" else 140
    given = zipf_inputs(n, 600, 16, bias=True, token_weight=True)
    each = torch.linspace(0.7, 1.5, n).masked_fill(given.labels == IGNORE, torch.nan)
    given = replace(given, temperature=each if one_each else 0.8)
    check_filtered(given, 2.0**-7, impl=impl, reduction="sum", label_smoothing=0.1)


@pytest.mark.usefixtures("one_launch_at_a_time")
def test_bits_do_not_depend_on_ranks():
    given = replace(problem(), temperature=torch.linspace(0.5, 2.0, 40))
    one = statistics(given, 1)
    assert all(x.isfinite().all() for x in one)
    assert differing(one, statistics(given, 2)) == []
    assert "loss" in differing(one, statistics(problem(), 1))


def test_calls_with_other_temperatures(one_launch_at_a_time):
    inputs = make_inputs(40, V, 16, bias=True)
    for temperature in (0.5, 0.6, torch.linspace(0.5, 2, 40), 0.8, torch.linspace(2, 0.5, 40)):
        check(replace(inputs, temperature=temperature), impl="triton", softcap=6.0)


def test_compiled():
    inputs = make_inputs(12, 60, 16, temperature=True)
    op = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for temperature in (inputs.temperature, 0.7):
        given = replace(inputs, temperature=temperature)
        compare(run(lambda **x: (op(**x),), given, Upstream()), given, Upstream())


def test_the_layer_takes_it_at_each_call():
    layer, given = LinearCrossEntropy(H, V), make_inputs(T, V, H, temperature=True)
    hidden, labels, temperature = given.hidden, given.labels, given.temperature
    expected = linear_cross_entropy(hidden, layer.weight, labels, temperature=temperature)
    metrics = layer.forward_with_metrics(hidden, labels, None, temperature)
    assert torch.equal(layer(hidden, labels, temperature=temperature), expected)
    assert torch.equal(metrics.loss, expected)
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        LinearCrossEntropy(H, V, temperature=0.5)  # type: ignore[call-arg]
