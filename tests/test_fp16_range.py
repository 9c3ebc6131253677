"""In fp16, whose numbers reach from 6e-8 to 65504, errors do not follow the upstream gradients.

Gradients scale with them. Weights far from 1 keep dhidden within the range, hidden states dweight.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flce_dist import (
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
    linear_divergence,
    linear_logprob,
)
from flce_dist.schedules import fit
from flce_dist.testing import error_budget
from tests import divergence_problem, problems, score_problem
from tests.filtered_formula import check_filtered
from tests.outcomes import Results
from tests.problems import IGNORE, Inputs, Upstream, both, everywhere, make_inputs, metric_upstream

FACTORS = {  # of upstream gradients, and of what the gradient is proportional to
    "a mean over many tokens": (2.0**-13, 2.0**8),
    "very small": (2.0**-20, 2.0**12),
    "a loss scale": (2.0**17, 2.0**-8),
}
GRADIENTS = ("dhidden", "dweight")
each_range = pytest.mark.parametrize("size", FACTORS)
each_gradient = pytest.mark.parametrize("name", GRADIENTS)


def scaled(given: Any, name: str, factor: float) -> Any:
    """The same logits, by hidden states and weights of other sizes."""
    of_weight = factor if name == "dhidden" else 1 / factor
    return replace(given, hidden=given.hidden / of_weight, weight=given.weight * of_weight)


def assert_accurate(name: str, actual: Results, truth: Results, eager: Results, g: float) -> None:
    """Compare results by small or large upstream gradients with others by those near 1."""
    budget = error_budget(actual[name].double() / g, truth[name], eager[name], dtype=torch.float16)
    assert budget.met, f"{name}: {budget}"


@both
@each_range
@each_gradient
@pytest.mark.parametrize("scores", [("logprob",), ("lse",), ("entropy",), None], ids=str)
@pytest.mark.parametrize("how", [{"schedule": "recompute"}, {"schedule": "cached"}], ids=str)
def test_scores(impl: str, size: str, name: str, scores: Any, how: dict[str, Any]) -> None:
    g, factor = FACTORS[size]
    given = score_problem.problem(torch.float16, scores=scores, **how)
    given = scaled(given, name, factor)
    changed = replace(given, upstream={k: g * x for k, x in given.upstream.items()})
    eager = score_problem.run_reference(given)
    truth = score_problem.run_reference(given.to(torch.float64))
    assert_accurate(name, score_problem.run_scores(changed, impl), truth, eager, g)


def problem_of_metrics(name: str, factor: float) -> Inputs:
    inputs: Inputs = scaled(make_inputs(24, 150, 32, torch.float16, bias=True), name, factor)
    return inputs


@both
@each_range
@each_gradient
@pytest.mark.parametrize("metrics", [("logprob",), ("lse", "logprob", "entropy")], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 9.0}], ids=str)
def test_metrics(impl: str, size: str, name: str, metrics: Any, options: dict[str, Any]) -> None:
    g, factor = FACTORS[size]
    inputs = problem_of_metrics(name, factor)
    upstream = Upstream(1.0, metric_upstream(24, *metrics))
    assert upstream.metrics is not None
    changed = Upstream(g, {k: g * x for k, x in upstream.metrics.items()})
    options = {"reduction": "none", **options}
    eager = problems.run_reference(inputs, upstream, **options)
    truth = problems.run_reference(inputs.to(torch.float64), upstream, **options)
    assert_accurate(name, problems.run_op(inputs, changed, impl=impl, **options), truth, eager, g)


@both
@each_range
@each_gradient
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_loss(impl: str, size: str, name: str, schedule: str) -> None:
    g, factor = FACTORS[size]
    inputs, options = problem_of_metrics(name, factor), {"reduction": "none"}
    eager = problems.run_reference(inputs, Upstream(1.0), **options)
    truth = problems.run_reference(inputs.to(torch.float64), Upstream(1.0), **options)
    actual = problems.run_op(inputs, Upstream(g), impl=impl, schedule=schedule, **options)
    assert_accurate(name, actual, truth, eager, g)


@both
@pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
@divergence_problem.each_kind
def test_divergences(impl: str, kind: str, schedule: str) -> None:
    """Of a large student with nearly equal probabilities and a small factor of its logits."""
    of_logits = 2.0**-10
    given = divergence_problem.problem(
        torch.float16, spread=0.05, bias=False,
        kind=kind, schedule=schedule, reduction="sum", logit_scale=of_logits,
    )  # fmt: skip
    given = replace(given, weight=given.weight / of_logits)
    loss_scale = torch.tensor(2.0**10)
    actual = divergence_problem.run_op(given, impl, upstream=loss_scale)
    truth, eager = (
        divergence_problem.run_reference(x, loss_scale) for x in (given.to(torch.float64), given)
    )
    for name in GRADIENTS:
        budget = error_budget(actual[name], truth[name], eager[name])
        assert budget.met, f"{name}: {budget}"


@both
@pytest.mark.parametrize("frozen, reduction", [
    (False, "sum"), (False, "mean"), (True, "sum"), (True, "mean"), (True, "none"),
])  # fmt: skip
def test_a_loss_scale_that_arrives_after_in_forward(
    impl: str, reduction: str, frozen: bool
) -> None:
    """dhidden is as small as the weights until then."""
    inputs = scaled(make_inputs(24, 150, 32, torch.float16, spread=0.05), "dhidden", 2.0**-11)
    loss_scale = torch.tensor(2.0**13)

    def dhidden(call: Any, given: Inputs, **options: Any) -> torch.Tensor:
        hidden = given.hidden.clone().requires_grad_()
        weight = given.weight.clone().requires_grad_(not frozen)
        loss = call(hidden, weight, given.labels, reduction=reduction, **options)
        loss.backward(loss_scale.to(loss).expand_as(loss))
        assert hidden.grad is not None
        return hidden.grad.cpu()

    def textbook(*args: Any, **options: Any) -> torch.Tensor:
        return problems.reference_linear_cross_entropy(*args, **options)[0]

    there = inputs.to(problems.device_of(impl))
    actual = dhidden(linear_cross_entropy, there, schedule="in_forward", impl=impl)
    truth, eager = (dhidden(textbook, x) for x in (inputs.to(torch.float64), inputs))
    budget = error_budget(actual, truth, eager)
    assert budget.met, budget


@both
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("size", [2.0**-22, 2.0**20])
def test_token_weights_that_precede_a_loss_scale(impl: str, reduction: str, size: float) -> None:
    """A mean does not depend on their size, and a sum's loss scale makes up for it."""
    inputs = make_inputs(24, 150, 32, torch.float16, token_weight=True)
    assert inputs.token_weight is not None
    inputs.token_weight.mul_(size)
    inputs.token_weight[inputs.labels == IGNORE] = 1e30  # which is not read
    loss_scale = 8.0 if reduction == "mean" else 1 / size
    how = {"schedule": "in_forward", "reduction": reduction}
    problems.check(inputs, Upstream(loss_scale), impl=impl, **how)


@both
@divergence_problem.each_kind
def test_token_weights_of_divergences_in_forward(impl: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = 2.0**-22 * torch.rand(divergence_problem.T, generator=generator)
    given = divergence_problem.problem(
        torch.float16, kind=kind, schedule="in_forward", token_weight=weights
    )
    divergence_problem.check(given, impl)


@both
def test_one_token_of_infinite_weight_in_forward(impl: str) -> None:
    """Tokens of finite weights keep their gradients."""
    inputs = make_inputs(24, 150, 32, torch.float16, token_weight=True, ignored=0.0)
    assert inputs.token_weight is not None
    how: dict[str, Any] = {"schedule": "in_forward", "reduction": "sum"}
    expected = problems.check(inputs, impl=impl, **how)
    inputs.token_weight[3] = torch.inf
    actual = problems.run_op(inputs, Upstream(1.0), impl=impl, **how)
    finite = torch.arange(24) != 3
    assert torch.equal(actual.dhidden[finite], expected.dhidden[finite])
    assert not actual.dhidden[3].isfinite().any()


@everywhere
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
@divergence_problem.each_kind
def test_a_loss_scale_at_students_near_their_teachers(impl: str, kind: str, schedule: str) -> None:
    """Hidden states times it are beyond the range, the gradients are not."""
    given = divergence_problem.problem(
        torch.float16, spread=0.05, bias=False, kind=kind, schedule=schedule, reduction="sum"
    )
    given = replace(given, hidden=given.hidden * 2, weight=given.weight / 2)
    loss_scale = torch.tensor(2.0**18)
    actual = divergence_problem.run_op(given, impl, upstream=loss_scale)
    truth, eager = (
        divergence_problem.run_reference(x, loss_scale) for x in (given.to(torch.float64), given)
    )
    assert eager["dweight"].isfinite().all()
    for name in GRADIENTS:
        budget = error_budget(actual[name], truth[name], eager[name])
        assert budget.met, f"{name}: {budget}"


def test_a_cached_divergence_is_differentiated_twice() -> None:
    """The first backward leaves D as it is."""
    given = divergence_problem.problem(torch.float16, schedule="cached", reduction="sum")
    leaves = given.hidden.requires_grad_(), given.weight.requires_grad_()
    loss = linear_divergence(**given.operands, **given.options, impl="eager") * 2.0**6
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    assert all(x.any() and torch.equal(x, y) for x, y in zip(first, again, strict=True))


def confident_inputs(V: int) -> Inputs:
    inputs: Inputs = make_inputs(3, V, 32, torch.float16, ignored=0.0)
    inputs.weight[inputs.labels] = inputs.hidden / 3
    return inputs


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "loss": lambda *of, **how: linear_cross_entropy(*of, reduction="sum", **how),
    "metrics": lambda *of, **how: -linear_cross_entropy_with_metrics(*of, **how).logprob.sum(),
    "scores": lambda h, w, ids, **how: -linear_logprob(h, w, ids[:, None], **how).logprob.sum(),
}


@everywhere
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_a_loss_scale_at_confident_tokens(impl: str, name: str, schedule: str) -> None:
    """Hidden states times it are beyond the range, the gradients are not."""
    inputs = confident_inputs(150)

    def gradients(call: Any, given: Inputs, **options: Any) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (given.hidden, given.weight)]
        (call(*leaves, given.labels, **options) * 2.0**15).backward()
        return tuple(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)

    def textbook(*args: Any) -> torch.Tensor:
        return problems.reference_linear_cross_entropy(*args, reduction="sum")[0]

    there = inputs.to(problems.device_of(impl))
    actual = gradients(CALLS[name], there, schedule=schedule, impl=impl)
    truth, eager = (gradients(textbook, x) for x in (inputs.to(torch.float64), inputs))
    for gradient, true, of_eager in zip(actual, truth, eager, strict=True):
        assert of_eager.isfinite().all()
        budget = error_budget(gradient, true, of_eager)
        assert budget.met, budget


@everywhere
def test_a_logit_scale_at_confident_tokens_in_forward(impl: str) -> None:
    of_logits = 2.0**15
    inputs = confident_inputs(150)
    inputs = replace(inputs, hidden=inputs.hidden * 4, weight=inputs.weight / (4 * of_logits))
    problems.check(inputs, impl=impl, schedule="in_forward", logit_scale=of_logits)


@everywhere
@pytest.mark.parametrize("bias", [False, True])
def test_loss_scales_at_confident_tokens_filtered(impl: str, bias: bool) -> None:
    """Of three tiles the first has no label. Profiles do not depend on the scales."""
    inputs = confident_inputs(600)
    assert inputs.labels.min() >= 256
    if bias:
        inputs = replace(inputs, bias=torch.zeros(600, dtype=torch.float16))
    upstream = Upstream(torch.tensor([2.0**15, 2.0**13, 1.0]))
    check_filtered(inputs, 2.0**-6, upstream, impl=impl, reduction="none")


@both
@pytest.mark.parametrize("how", [{"max_counted": 20}, {"skip_ignored": True}], ids=str)
def test_hidden_states_are_scaled_once_no_window_reads_them_again(impl, how, monkeypatch):
    """A gradient of the entropy computes cached columns again, here in several windows."""
    for name in ("_MIN_WINDOW", "_MAX_WINDOW"):
        monkeypatch.setattr(fit, name, 64)
    inputs = make_inputs(24, 300, 32, torch.float16, ignored=0.4)
    upstream = Upstream(1.0, metric_upstream(24, "lse", "entropy"))
    problems.check(inputs, upstream, impl=impl, schedule="cached", **how)


@both
def test_named_ids_alone_that_pass_the_range_of_frozen_scores(impl: str) -> None:
    """The gradient is 800 (150 - 80.1); its part at the named id 800 times 150."""
    device = problems.device_of(impl)
    hidden = torch.zeros(64, 16, dtype=torch.float16, device=device)
    weight = torch.full((512, 16), 80.0, dtype=torch.float16, device=device)
    weight[0] = 150.0
    ids = torch.zeros(64, 1, dtype=torch.long, device=device)
    gradients = []
    ways: list[dict[str, Any]] = [{"schedule": "auto"}, {"schedule": "recompute"}]
    for way in ways:
        x = hidden.clone().requires_grad_()
        scores = linear_logprob(x, weight, ids, **{"impl": impl, **way})
        scores.logprob.sum().mul(800.0).backward()
        gradients.append(x.grad)
    expected = torch.full_like(hidden, 800.0 * 70.0 * (1 - 1 / 512))
    for gradient in gradients:
        torch.testing.assert_close(gradient, expected, rtol=2e-3, atol=0.0)
