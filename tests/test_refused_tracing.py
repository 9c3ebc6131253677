"""What is refused by name: derivatives of gradients, forward mode, transforms, recorders, tensors
without data, and gradients of metrics that a schedule has not.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from flce_dist import LinearCrossEntropy, filtered, linear_cross_entropy, linear_divergence, plan
from tests.function_calls import CALLS
from tests.problems import METRICS, Upstream, each_schedule, graph, metric_upstream, run_op, small


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


@each_schedule
def test_forward_mode_is_refused_by_name(schedule):
    inputs = small("eager")

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, inputs.labels, schedule=schedule)

    leaves = inputs.hidden, inputs.weight
    with pytest.raises(NotImplementedError, match=r"^flce_dist has no forward-mode derivative"):
        torch.autograd.functional.jacobian(loss, leaves, strategy="forward-mode", vectorize=True)
    for changed in range(2):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            dual = forward_ad.make_dual(leaves[changed], torch.ones_like(leaves[changed]))
            loss(*(dual if i == changed else x for i, x in enumerate(leaves)))


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


RECORDERS: dict[str, Callable[..., Any]] = {
    "make_fx": lambda f, weight: make_fx(f)(weight),
    "linearize": torch.func.linearize,
    "jit.trace": lambda f, weight: torch.jit.trace(f, (weight,)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("name", CALLS)
def test_recorders_are_refused_by_name(name, recorder):
    inputs = small("eager")
    ids = inputs.labels.clamp(min=0)
    message = f"^{name} is not recorded by make_fx, torch.func.linearize and torch.jit.trace"
    with pytest.raises(NotImplementedError, match=message):
        RECORDERS[recorder](lambda weight: CALLS[name](inputs.hidden, weight, ids), inputs.weight)


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_are_refused_by_name(name):
    """In their mode and outside it; a plan of them is made, as of shapes."""
    with FakeTensorMode() as mode:
        fakes = torch.empty(6, 4), torch.empty(9, 4), torch.zeros(6, dtype=torch.int64)
    for inside in (mode, nullcontext()):
        with inside, pytest.raises(ValueError, match=f"got a FakeTensor: call {name} outside Fake"):
            CALLS[name](*fakes)
        with inside:
            assert plan(*fakes).tokens == 6


@pytest.mark.parametrize("which", ["weight", "labels"])
@pytest.mark.parametrize("name", CALLS)
def test_one_fake_tensor_among_others_is_refused_by_name(name, which):
    """A mode that allows for that would return memory that nobody has written."""
    names = "hidden", "weight", "labels"
    real = torch.ones(6, 4), torch.ones(9, 4), torch.zeros(6, dtype=torch.int64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = torch.empty(6, 4), torch.empty(9, 4), torch.zeros(6, dtype=torch.int64)
    pairs = zip(names, real, fakes, strict=True)
    given = [fake if x == which else own for x, own, fake in pairs]
    if which == "labels" and name in ("linear_sample", "linear_divergence"):
        pytest.skip("the call has none")
    if which == "labels" and name == "linear_logprob":
        which = "ids"
    with pytest.raises(ValueError, match=f"^{which} must hold data, got a FakeTensor"):
        CALLS[name](*given)


class Halved(Tensor):
    """A tensor of halves that holds whole numbers, as a quantised one does."""

    whole: Tensor

    def __new__(cls, whole):
        self = Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)
        self.whole = whole
        return self

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):  # type: ignore[override]
        if operator is torch.ops.aten.detach.default:
            return cls(args[0].whole)
        plain = tree_map_only(cls, lambda x: x.whole / 2, (args, kwargs or {}))
        return operator(*plain[0], **plain[1])


@pytest.mark.parametrize("which", ["hidden", "weight"])
@pytest.mark.parametrize("name", [*CALLS, "plan"])
def test_tensors_that_hold_others_are_refused_by_name(name, which):
    """Kernels have no address of them; operators may write to their copies."""
    given = {"hidden": torch.ones(6, 4), "weight": torch.ones(9, 4)}
    given[which] = Halved(given[which])
    calls: dict[str, Callable[..., Any]] = {**CALLS, "plan": plan}
    with pytest.raises(ValueError, match=rf"^{which} must be a plain tensor .*, got Halved"):
        calls[name](*given.values(), torch.zeros(6, dtype=torch.int64))


def test_a_teacher_and_vectors_that_hold_others_are_refused_by_name():
    hidden, weight = torch.ones(6, 4), torch.ones(9, 4)
    labels = torch.zeros(6, dtype=torch.int64)
    vectors = {"bias": torch.ones(9), "token_weight": torch.ones(6), "temperature": torch.ones(6)}
    for name, x in vectors.items():
        of_loss: Any = {name: Halved(x)}
        with pytest.raises(ValueError, match=f"^{name} must be a plain tensor"):
            linear_cross_entropy(hidden, weight, labels, **of_loss)
    for name, x in {"teacher_hidden": hidden, "teacher_weight": weight}.items():
        teacher: Any = {"teacher_hidden": hidden, "teacher_weight": weight, name: Halved(x)}
        with pytest.raises(ValueError, match=f"^{name} must be a plain tensor"):
            linear_divergence(hidden, weight, **teacher)


def test_a_layer_made_of_fake_tensors_has_no_values():
    with FakeTensorMode():
        layer = LinearCrossEntropy(4, 9, bias=True)
        assert layer.logits(torch.empty(6, 4)).shape == (6, 9)
        with pytest.raises(ValueError, match="got a FakeTensor: call linear_cross_entropy outside"):
            layer(torch.empty(6, 4), torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^weight must hold data, got a FakeTensor"):
        layer(torch.ones(6, 4), torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize(("schedule", "message"), [
    ("in_forward", "use schedule='recompute'"),
    (filtered.schedule(0.1), r"filtered\.schedule has gradients of the loss only"),
])  # fmt: skip
@pytest.mark.parametrize("name", METRICS)
def test_gradients_of_metrics_are_refused(name, schedule, message):
    inputs, upstream = small("eager"), Upstream(1.0, metric_upstream(37, name))
    with pytest.raises(NotImplementedError, match=message):
        run_op(inputs, upstream, impl="eager", schedule=schedule)
