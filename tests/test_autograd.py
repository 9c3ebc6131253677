"""The op within autograd: frozen operands, second passes, changes in place, refusals."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import filtered, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.testing import relative_rms
from tests.problems import (
    METRICS,
    SCHEDULES,
    Inputs,
    Upstream,
    both,
    device_of,
    each_schedule,
    make_inputs,
    metric_upstream,
    poisoned_memory,
    run_op,
    small,
)

each_way = pytest.mark.parametrize(
    "way",
    [*({"schedule": schedule} for schedule in SCHEDULES), {"schedule": filtered.schedule(0.1)}],
    ids=str,
)

# --- frozen operands


@both
@each_way
@poisoned_memory()
def test_frozen_operands(impl, way):
    """Every subset of trainable operands gets the same gradients as all together."""
    inputs = make_inputs(20, 70, 32, bias=True).to(device_of(impl))
    operands = {"hidden": inputs.hidden, "weight": inputs.weight, "bias": inputs.bias}
    expected = run_op(inputs, Upstream(), impl=impl, label_smoothing=0.1, **way)
    for trainable in itertools.product([False, True], repeat=3):
        leaves: dict[str, Any] = {
            name: x.detach().clone().requires_grad_(live)  # type: ignore[union-attr]
            for (name, x), live in zip(operands.items(), trainable, strict=True)
        }
        loss = linear_cross_entropy(
            labels=inputs.labels, impl=impl, label_smoothing=0.1, **way, **leaves
        )
        # Without gradients in_forward has nothing to do and sums tokens in another order.
        same_order = any(trainable) or way != {"schedule": "in_forward"}
        assert relative_rms(loss.cpu(), expected["loss"]) <= (0.0 if same_order else 1e-6)
        assert loss.requires_grad == any(trainable)
        if any(trainable):
            loss.backward()
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                assert leaf.grad is not None
                assert torch.equal(leaf.grad.cpu(), expected[f"d{name}"]), name
            else:
                assert leaf.grad is None


# --- the graph


def graph(inputs: Inputs, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    leaves = [
        x.detach().clone().requires_grad_()
        for x in (inputs.hidden, inputs.weight, inputs.bias)
        if x is not None
    ]
    hidden, weight, bias = leaves
    return linear_cross_entropy(hidden, weight, inputs.labels, bias=bias, **kwargs), leaves


@both
@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_second_backward_is_equal_to_the_first(impl, way, dtype):
    """Others in between leave nothing behind: that of a metric recomputes cached columns."""
    inputs = small(impl).to(dtype)
    hidden, weight = leaves = [x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight)]
    options = {"impl": impl, "label_smoothing": 0.1, **way}
    out = linear_cross_entropy_with_metrics(hidden, weight, inputs.labels, **options)
    first = torch.autograd.grad(out.loss, leaves, retain_graph=True)
    torch.autograd.grad(2 * out.loss, leaves, retain_graph=True)
    if way["schedule"] in ("recompute", "cached"):
        torch.autograd.grad(out.entropy.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.loss, leaves)
    assert all(map(torch.equal, first, second))


@each_schedule
@pytest.mark.parametrize("changed", [0, 1], ids=["hidden", "weight"])
def test_a_change_in_place_after_forward(schedule, changed):
    """It raises, but for in_forward, which has its gradients and needs no operands."""
    inputs = small("eager")
    loss, leaves = graph(inputs, schedule=schedule)
    with torch.no_grad():
        leaves[changed].zero_()
    if schedule == "in_forward":
        expected = run_op(inputs, Upstream(), impl="eager", schedule=schedule)
        assert torch.equal(torch.autograd.grad(loss, leaves)[0], expected["dhidden"])
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_schedule
def test_metrics_may_be_changed_in_place(schedule):
    """Changing returned tensors does not change backward (or autograd raises)."""
    inputs = small("eager")
    hidden = inputs.hidden.clone().requires_grad_()
    out = linear_cross_entropy_with_metrics(hidden, inputs.weight, inputs.labels, schedule=schedule)
    assert out.correct.dtype == torch.bool and not out.correct.requires_grad
    (expected,) = torch.autograd.grad(out.loss, hidden, retain_graph=True)
    with torch.no_grad():
        out.lse.zero_()
        out.logprob.zero_()
    assert torch.equal(torch.autograd.grad(out.loss, hidden)[0], expected)


# --- refusals


@each_schedule
def test_second_derivatives_and_batches_are_refused_by_name(schedule):
    loss, leaves = graph(small("eager"), schedule=schedule)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(loss, leaves, create_graph=True)
    upstream = torch.ones(2, *loss.shape)
    message = r"is_grads_batched=True.* once for each upstream"
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(loss, leaves, upstream, is_grads_batched=True)
    with pytest.raises(NotImplementedError, match=message):
        torch.vmap(lambda g: torch.autograd.grad(loss, leaves, g, retain_graph=True))(upstream)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, weight: torch.func.grad(f)(weight),
    "jacrev": lambda f, weight: torch.func.jacrev(f)(weight),
    "jvp": lambda f, weight: torch.func.jvp(f, (weight,), (weight,)),
    "vmap": lambda f, weight: torch.vmap(f)(torch.stack([weight, weight])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_by_name(name):
    inputs = small("eager")

    def loss(weight: Tensor) -> Tensor:
        return linear_cross_entropy(inputs.hidden, weight, inputs.labels)

    with pytest.raises(NotImplementedError, match=r"torch\.func .* use backward or torch"):
        TRANSFORMS[name](loss, inputs.weight)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("in_forward", "use schedule='recompute'"),
        (filtered.schedule(0.1), r"filtered\.schedule has gradients of the loss only"),
    ],
)
@pytest.mark.parametrize("name", METRICS)
def test_gradients_of_metrics_are_refused(name, schedule, message):
    inputs, upstream = small("eager"), Upstream(1.0, metric_upstream(37, name))
    with pytest.raises(NotImplementedError, match=message):
        run_op(inputs, upstream, impl="eager", schedule=schedule)
