"""Tensors whose memory holds the negative of their numbers, as the imaginary part of a conjugate.

Kernels read memory, so such a view must be resolved before.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from tests.problems import (
    Inputs,
    both,
    device_of,
    each_schedule,
    make_inputs,
    metric_upstream,
    per_token_upstream,
)

NAMES = ("hidden", "weight", "bias", "token_weight")
T = 20


def negated(x: Tensor) -> Tensor:
    """Return x as a view of the memory of -x."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg() and not view.resolve_neg().is_neg()
    return view


def inputs(impl: str = "eager") -> Inputs:
    return make_inputs(T, 70, 16, bias=True, token_weight=True).to(device_of(impl))


def results(inputs: Inputs, names: tuple[str, ...], upstream: Any, **options: Any) -> list[Tensor]:
    """Outputs, and gradients of what ``names`` are views of; all but token_weight are leaves."""
    given = {name: getattr(inputs, name).clone() for name in NAMES}
    leaves = [given[name].requires_grad_() for name in NAMES[:3]]
    passed = {name: negated(x) if name in names else x for name, x in given.items()}
    call: Any = linear_cross_entropy
    if isinstance(upstream, list):
        call = linear_cross_entropy_with_metrics
    outputs = call(labels=inputs.labels, **passed, **options)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs[:4])
    upstream = upstream if isinstance(upstream, list) else [upstream]
    return [x.detach() for x in outputs] + list(torch.autograd.grad(outputs, leaves, upstream))


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


@both
@each_schedule
@pytest.mark.parametrize("name", NAMES)
def test_operands(name, schedule, impl):
    options: dict[str, Any] = {"impl": impl, "schedule": schedule, "reduction": "sum"}
    g = torch.tensor(0.7, device=device_of(impl))
    assert_equal(*(results(inputs(impl), names, g, **options) for names in ((name,), ())))


@both
@each_schedule
def test_the_gradient_of_the_loss(schedule, impl):
    reduction = "sum" if schedule == "in_forward" else "none"
    g = torch.tensor(0.7) if reduction == "sum" else per_token_upstream(T)
    g = g.to(device_of(impl))
    options: dict[str, Any] = {"impl": impl, "schedule": schedule, "reduction": reduction}
    assert_equal(*(results(inputs(impl), (), x, **options) for x in (negated(g), g)))


@both
def test_gradients_of_metrics(impl):
    g = [per_token_upstream(T), *metric_upstream(T, "lse", "logprob", "entropy").values()]
    g = [x.to(device_of(impl)) for x in g]
    given = ([negated(x) for x in g], g)
    options = {"impl": impl, "reduction": "none"}
    assert_equal(*(results(inputs(impl), (), x, **options) for x in given))


def test_compiled():
    torch._dynamo.reset()
    given = inputs("triton")

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, given.labels, impl="triton", schedule="recompute", reduction="none"
        )

    def run(call: Any, view: Any) -> list[Tensor]:
        hidden, weight = (x.clone().requires_grad_() for x in (given.hidden, given.weight))
        out = call(view(hidden), view(weight))
        g = view(per_token_upstream(T).to(out))
        return [out.detach(), *torch.autograd.grad(out, (hidden, weight), g)]

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_equal(run(compiled, negated), run(loss, lambda x: x))
