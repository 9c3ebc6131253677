"""``linear_divergence`` in autograd: gradcheck, one gradient alone, a second one, main_grad."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_divergence
from flce_dist.testing import relative_rms
from tests.divergence_problem import WAYS, each_kind, problem, run_op, upstream_of
from tests.problems import both, device_of


@each_kind
@pytest.mark.parametrize("schedule", ["in_forward", "cached", "recompute"])
def test_gradcheck(kind: str, schedule: str) -> None:
    given = problem(torch.float64, rows=20, tokens=(5,), kind=kind, ignored=0.0)
    hidden = given.hidden.requires_grad_()
    weight = given.weight.requires_grad_()
    options: Any = {"kind": kind, "schedule": schedule}

    def value(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_divergence(
            hidden, weight, given.teacher_hidden, given.teacher_weight, **options
        )

    assert torch.autograd.gradcheck(value, (hidden, weight), fast_mode=True)


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("way", range(5))
@both
def test_one_gradient_alone(impl: Any, way: int, wanted: str) -> None:
    """As with a frozen student's head, or of one that is trained alone."""
    given = problem(**WAYS[way]).to(device_of(impl))
    leaves = {x: y.clone().requires_grad_(x == wanted) for x, y in given.operands.items()}
    loss = linear_divergence(**leaves, **given.options, impl=impl)
    loss.sum().backward()
    truth = given.to(torch.device("cpu"))
    expected = run_op(truth, impl, upstream=torch.ones(()).expand(loss.shape))
    assert [name for name, x in leaves.items() if x.grad is not None] == [wanted]
    gradient = leaves[wanted].grad
    assert gradient is not None and relative_rms(gradient.cpu(), expected[f"d{wanted}"]) <= 1e-6


@pytest.mark.parametrize("way", range(5))
def test_backward_twice(way: int) -> None:
    given = problem(torch.float64, **WAYS[way])
    hidden = given.hidden.requires_grad_()
    weight = given.weight.requires_grad_()
    operands = {**given.operands, "hidden": hidden, "weight": weight}
    loss = linear_divergence(**operands, **given.options).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(2 * loss, (hidden, weight))
    assert all(torch.allclose(2 * x, y, equal_nan=True) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", range(5))
@both
def test_main_grad(impl: Any, way: int, dtype: torch.dtype) -> None:
    given = problem(dtype, **WAYS[way]).to(device_of(impl))
    expected = run_op(problem(dtype, **WAYS[way]), impl, upstream=None)["dweight"]
    weight = given.weight.clone().requires_grad_()
    holder: Any = weight
    holder.main_grad = torch.full_like(weight, 0.25, dtype=torch.float32)
    loss = linear_divergence(
        **{**given.operands, "weight": weight}, **given.options, impl=impl, accumulate_dweight=True
    )
    upstream = upstream_of(given)
    loss.backward(None if upstream is None else upstream.to(loss))
    assert weight.grad is None
    limit = 1e-6 if dtype == torch.float32 else 6e-3
    assert relative_rms(holder.main_grad.cpu(), expected + 0.25) <= limit


@pytest.mark.parametrize("kind_of_dweight", ["own", "main_grad"])
def test_many_groups_are_rounded_once(kind_of_dweight: str) -> None:
    """dweight of 32 groups that are computed again, as exact as that of D that forward kept."""
    given = problem(torch.bfloat16, tokens=(4096,), max_logits_bytes=1, schedule="recompute")
    kept = given.changed(max_logits_bytes=None, schedule="cached")
    exact = run_op(given.to(torch.float64), "eager")["dweight"]

    def error(pair: Any) -> float:
        weight = pair.weight.clone().requires_grad_()
        options = dict(pair.options)
        if kind_of_dweight == "main_grad":
            weight.main_grad = torch.zeros_like(weight)
            options["accumulate_dweight"] = True
        operands = {**pair.operands, "weight": weight}
        linear_divergence(**operands, **options, impl="eager").backward()
        dweight = getattr(weight, "main_grad", None)
        return relative_rms(weight.grad if dweight is None else dweight, exact)

    assert error(given) <= 1.5 * error(kept)
