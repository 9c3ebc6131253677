"""Where D is a difference of nearly equal numbers, or of few: what rounding to 16 bits costs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy, plan
from flce_dist.testing import ErrorBudget, error_budget
from tests import problems
from tests.problems import Inputs, Upstream, both, check, make_inputs, metric_upstream

T, H = 40, 32
SPREAD = 0.05  # of logits: probabilities are nearly equal
HALF = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALF, ids=str)

OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "a smaller share": {"label_smoothing": 0.99},
    "sum, z-loss": {"reduction": "sum", "z_loss_weight": 0.01},
    "recompute, negative scale": {"schedule": "recompute", "logit_scale": -1.3},
    "none, windows": {"reduction": "none", "max_logits_bytes": 1},
    "skips": {"skip_ignored": True},
}


def dhidden_of_a_frozen_head(inputs: Inputs, impl: str, **options: Any) -> ErrorBudget:
    def dhidden(call: Any, given: Inputs, **keywords: Any) -> Tensor:
        hidden = given.hidden.clone().requires_grad_()
        call(hidden, given.weight, given.labels, **keywords).backward()
        assert hidden.grad is not None
        return hidden.grad.cpu()

    def textbook(*args: Any, **keywords: Any) -> Tensor:
        keywords.pop("schedule", None)
        return problems.reference_linear_cross_entropy(*args, **keywords)[0]

    there = inputs.to(problems.device_of(impl))
    actual = dhidden(linear_cross_entropy, there, impl=impl, **options)
    truth = dhidden(textbook, inputs.to(torch.float64), **options)
    return error_budget(actual, truth, dhidden(textbook, inputs, **options))


@both
@each_half
@pytest.mark.parametrize("V", [2, 30, 300])
@pytest.mark.parametrize("name", OPTIONS)
def test_smoothing_that_cancels_probabilities(
    impl: str, dtype: torch.dtype, V: int, name: str
) -> None:
    inputs = make_inputs(T, V, H, dtype, spread=SPREAD, token_weight=True, temperature=True)
    check(inputs, impl=impl, **{"label_smoothing": 1.0, **OPTIONS[name]})


@both
@each_half
def test_with_gradients_of_metrics(impl: str, dtype: torch.dtype) -> None:
    upstream = Upstream(1.0, metric_upstream(T, "lse", "entropy"))
    inputs = make_inputs(T, 100, H, dtype, spread=SPREAD)
    check(inputs, upstream, impl=impl, label_smoothing=1.0, reduction="sum")


@both
@each_half
def test_a_frozen_head(impl: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(T, 100, H, dtype, spread=SPREAD)
    budget = dhidden_of_a_frozen_head(inputs, impl, label_smoothing=1.0)
    assert budget.met, budget


@pytest.mark.parametrize("schedule", ["cached", "in_forward"])
def test_kept_exponentials_are_rounded_before_they_cancel(schedule: str) -> None:
    """The error is theirs, relative to what is left of them."""
    dtype = torch.bfloat16
    for spread in (0.02, 0.1, 0.5):
        inputs = make_inputs(T, 100, H, dtype, spread=spread)
        options = {"label_smoothing": 1.0, "schedule": schedule}
        error = dhidden_of_a_frozen_head(inputs, "eager", **options).error
        assert error <= torch.finfo(dtype).eps / spread


@pytest.mark.parametrize("dtype, V, smoothing, computed", [
    (torch.bfloat16, 128256, 0.1, "in_forward"),
    (torch.bfloat16, 128256, 0.99, "in_forward"),
    (torch.bfloat16, 128256, 0.999, "recompute"),
    (torch.float32, 100, 1.0, "cached"),
    (torch.float16, 1024, 0.0, "recompute"),
    (torch.float16, 1025, 0.0, "cached"),
    (torch.bfloat16, 2, 0.0, "cached"),
])  # fmt: skip
def test_auto_recomputes_only_where_rounding_shows(
    dtype: torch.dtype, V: int, smoothing: float, computed: str
) -> None:
    shapes = ((8192, 4096), (V, 4096), (8192,))
    assert plan(*shapes, dtype=dtype, label_smoothing=smoothing).schedule == computed


def of_few_entries(V: int, tokens: int, seed: int) -> Inputs:
    """In fp16; rows of the weight share a vector, of which errors of D's sum become multiples."""
    inputs = make_inputs(tokens, V, H, torch.float16, seed=seed, spread=0.5, ignored=0.0)
    shared = torch.randn(H, generator=torch.Generator().manual_seed(seed)) / H**0.5
    return replace(inputs, weight=inputs.weight + 2 * shared.half())


@both
@pytest.mark.parametrize("V", [2, 3, 4])
def test_few_entries_in_fp16(impl: str, V: int) -> None:
    for seed in range(6):
        check(of_few_entries(V, 3 + 4 * seed, seed), impl=impl, reduction="sum")
        budget = dhidden_of_a_frozen_head(of_few_entries(V, 3, seed), impl)
        assert budget.met, budget


@both
@pytest.mark.parametrize("schedule", ["cached", "in_forward"])
def test_kept_exponentials_of_fp16_have_the_accuracy_of_bf16(impl: str, schedule: str) -> None:
    for V in (2, 3, 4):
        inputs = make_inputs(7, V, H, torch.float16, seed=V, spread=0.5, ignored=0.0)
        options = {"schedule": schedule, "reduction": "sum"}
        actual = problems.run_op(inputs, Upstream(), impl=impl, **options)
        truth = problems.run_reference(inputs.to(torch.float64), Upstream(), **options)
        eager = problems.run_reference(inputs, Upstream(), **options)
        for name in ("dhidden", "dweight"):
            budget = error_budget(actual[name], truth[name], eager[name], dtype=torch.bfloat16)
            assert budget.met, f"{name}: {budget}"
