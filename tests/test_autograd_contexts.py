"""The op within autocast, activation checkpointing and evaluation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.testing import relative_rms
from tests.problems import Upstream, both, each_schedule, run_op, small
from tests.test_autograd import graph

# --- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both
@each_schedule
def test_autocast_computes_in_its_dtype_with_fp32_gradients(impl, schedule, dtype):
    """fp32 parameters and hidden of any dtype give the same bits as explicit casts."""
    inputs = small(impl)
    options = {"impl": impl, "schedule": schedule, "label_smoothing": 0.1}
    by_hand = run_op(inputs.to(dtype), Upstream(), **options)
    for hidden_dtype in (torch.float32, dtype):
        hidden = inputs.hidden.detach().clone().to(hidden_dtype).requires_grad_()
        weight = inputs.weight.clone().requires_grad_()
        bias = inputs.bias.clone().requires_grad_()  # type: ignore[union-attr]
        with torch.autocast(hidden.device.type, dtype):
            loss = linear_cross_entropy(hidden, weight, inputs.labels, bias=bias, **options)
        assert loss.dtype == torch.float32
        assert torch.equal(loss.detach().cpu(), by_hand["loss"])
        loss.backward()
        for name, leaf in (("hidden", hidden), ("weight", weight), ("bias", bias)):
            assert leaf.grad is not None
            assert leaf.grad.dtype == leaf.dtype
            assert torch.equal(leaf.grad.cpu(), by_hand[f"d{name}"].to(leaf.dtype))


@each_schedule
def test_backward_within_autocast_is_the_same(schedule):
    inputs = small("eager")
    with torch.autocast("cpu", torch.bfloat16):
        loss, leaves = graph(inputs, schedule=schedule)
        inside = torch.autograd.grad(loss, leaves, retain_graph=True)
    outside = torch.autograd.grad(loss, leaves)
    assert all(map(torch.equal, inside, outside))


def test_autocast_leaves_fp64_alone():
    inputs = small("eager").to(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels)
        assert F.linear(inputs.hidden, inputs.weight).dtype == torch.float64
    assert loss.dtype == torch.float64


# --- checkpointing and evaluation


@both
@each_schedule
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(impl, schedule, use_reentrant):
    inputs = small(impl)

    def layer(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(2 * hidden, weight, inputs.labels, impl=impl, schedule=schedule)

    def gradients(call: Callable[..., Tensor], **kwargs: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight)]
        loss = call(*leaves, **kwargs)
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected = gradients(layer)
    actual = gradients(lambda *leaves: checkpoint(layer, *leaves, use_reentrant=use_reentrant))
    assert len(actual) == 3
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(
    "options, alone, not_reentrant, reentrant",
    [
        ({"schedule": "recompute"}, 4, 5, 5),
        ({"schedule": "cached"}, 3, 4, 4),
        ({"schedule": "in_forward"}, 3, 6, 4),
        ({"schedule": "auto", "max_logits_bytes": 12 * 9000 * 4}, 3, 6, 4),
    ],
)
def test_matrix_products_of_a_checkpointed_call(options, alone, not_reentrant, reentrant):
    """The first pass of a checkpoint runs with gradients, so in_forward computes them in vain."""
    T, V, H = 12, 12288, 4  # auto is in_forward here
    hidden, weight = (torch.randn(n, H, requires_grad=True) for n in (T, V))
    labels = torch.randint(V, (T,))

    def layer(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, impl="eager", **options)

    def product(acc: Any, a: list[int], b: list[int], **_: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    for use_reentrant, expected in ((None, alone), (False, not_reentrant), (True, reentrant)):
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product})
        with counter:
            if use_reentrant is None:
                loss = layer(hidden, weight)
            else:
                loss = checkpoint(layer, hidden, weight, use_reentrant=use_reentrant)
            loss.backward()
        assert counter.get_total_flops() == expected * 2 * T * V * H, use_reentrant


@both
@each_schedule
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_same_loss_and_no_graph(impl, schedule, mode):
    inputs = small(impl)
    options = {"impl": impl, "schedule": schedule}
    hidden = inputs.hidden.clone().requires_grad_()
    expected = linear_cross_entropy(hidden, inputs.weight, inputs.labels, **options)
    with mode():
        loss = linear_cross_entropy(hidden, inputs.weight, inputs.labels, **options)
        out = linear_cross_entropy_with_metrics(hidden, inputs.weight, inputs.labels, **options)
    assert loss.grad_fn is None and not loss.requires_grad
    assert not any(x.requires_grad for x in out)
    # in_forward sums its chunks one after the other.
    assert relative_rms(loss, expected) <= (1e-6 if schedule == "in_forward" else 0.0)
