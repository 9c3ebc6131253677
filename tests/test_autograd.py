"""The op within autograd: frozen operands, second passes, changes in place, autocast, activation
checkpointing, another current device, refusals.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flce_dist import (
    LinearCrossEntropy,
    data_parallel_linear_cross_entropy,
    filtered,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
    linear_divergence,
    linear_logprob,
    linear_sample,
    linear_top_k,
    plan,
)
from flce_dist.kernels import eager, gpu
from flce_dist.parallel import collectives
from flce_dist.testing import relative_rms
from tests.devices import our_call
from tests.flops import gemms_of
from tests.problems import (
    METRICS,
    SCHEDULES,
    Inputs,
    Upstream,
    both,
    device_of,
    each_schedule,
    everywhere,
    make_inputs,
    metric_upstream,
    poisoned_memory,
    run,
    run_op,
    small,
)

WAYS = [{"schedule": schedule} for schedule in (*SCHEDULES, filtered.schedule(0.1))]
each_way = pytest.mark.parametrize("way", WAYS, ids=str)


@both
@each_way
@poisoned_memory()
def test_frozen_operands(impl, way):
    """Every subset of trainable operands gets the same gradients as all together."""
    inputs = make_inputs(20, 70, 32, bias=True).to(device_of(impl))
    operands = {"hidden": inputs.hidden, "weight": inputs.weight, "bias": inputs.bias}
    options: dict[str, Any] = {"impl": impl, "label_smoothing": 0.1, **way}
    expected = run_op(inputs, Upstream(), **options)
    for trainable in itertools.product([False, True], repeat=3):
        leaves: dict[str, Any] = {
            name: x.detach().clone().requires_grad_(live)  # type: ignore[union-attr]
            for (name, x), live in zip(operands.items(), trainable, strict=True)
        }
        loss = linear_cross_entropy(labels=inputs.labels, **options, **leaves)
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


def graph(inputs: Inputs, **kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    assert inputs.bias is not None
    operands = inputs.hidden, inputs.weight, inputs.bias
    leaves = hidden, weight, bias = [x.detach().clone().requires_grad_() for x in operands]
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@everywhere
@each_schedule
def test_autocast_computes_in_its_dtype_with_fp32_gradients(impl, schedule, dtype):
    """The bits of explicit casts, for hidden of any dtype, and if backward is within autocast."""
    inputs = small(impl)
    options = {"impl": impl, "schedule": schedule, "label_smoothing": 0.1}
    by_hand = run_op(inputs.to(dtype), Upstream(), **options)
    for given in (inputs, replace(inputs, hidden=inputs.hidden.to(dtype))):
        with torch.autocast(inputs.hidden.device.type, dtype):
            loss, leaves = graph(given, **options)
            inside = torch.autograd.grad(loss, leaves, retain_graph=True)
        outside = torch.autograd.grad(loss, leaves)
        assert loss.dtype == torch.float32
        assert torch.equal(loss.detach().cpu(), by_hand["loss"])
        names = "dhidden", "dweight", "dbias"
        for name, leaf, *gradients in zip(names, leaves, inside, outside, strict=True):
            expected = by_hand[name].to(leaf.dtype)
            for gradient in gradients:
                assert gradient.dtype == leaf.dtype and torch.equal(gradient.cpu(), expected), name


def test_autocast_leaves_fp64_alone():
    inputs = small("eager").to(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels)
        assert F.linear(inputs.hidden, inputs.weight).dtype == torch.float64
    assert loss.dtype == torch.float64


@pytest.mark.parametrize("options, alone, not_reentrant, reentrant", [
    ({"schedule": "recompute"}, 4, 5, 5),
    ({"schedule": "cached"}, 3, 4, 4),
    ({"schedule": "in_forward"}, 3, 6, 4),
    ({"schedule": "auto", "max_logits_bytes": 12 * 9000 * 4}, 3, 6, 4),
])  # fmt: skip
def test_matrix_products_of_a_checkpointed_call(options, alone, not_reentrant, reentrant):
    """The first pass of a checkpoint runs with gradients, so in_forward computes them in vain."""
    T, V, H = 12, 12288, 4  # auto is in_forward here
    hidden, weight = (torch.randn(n, H, requires_grad=True) for n in (T, V))
    labels = torch.randint(V, (T,))

    def layer(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, impl="eager", **options)

    def step(use_reentrant: bool | None) -> None:
        if use_reentrant is None:
            loss = layer(hidden, weight)
        else:
            loss = checkpoint(layer, hidden, weight, use_reentrant=use_reentrant)
        loss.backward()

    for use_reentrant, expected in ((None, alone), (False, not_reentrant), (True, reentrant)):
        assert gemms_of(partial(step, use_reentrant), T, V, H) == expected, use_reentrant


@each_schedule
@pytest.mark.parametrize("compiled", [False, True])
def test_every_kernel_runs_on_the_device_of_its_tensors(mutate, monkeypatch, compiled, schedule):
    current: list[torch.device] = []  # in nested contexts
    launches: dict[str, set[bool]] = {}

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        current.append(x.device)
        yield
        current.pop()

    def launch(name: str, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        launches.setdefault(name, set()).add(torch.device("cpu") in current)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(Tensor, "get_device", lambda x: 0)  # while the current one is none
    for name in (name for name in vars(gpu) if not name.startswith("_")):
        mutate(eager, name, partial(launch, name))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)  # True: by the operators
    run(our_call, small("eager"), Upstream(), schedule=schedule)
    assert {"linear_stats", "token_loss", "row_gradient"} <= set(launches)
    assert {name for name, of_tensors in launches.items() if of_tensors != {True}} == set()


@pytest.mark.parametrize(
    ("backends", "device"), [("cuda:nccl", "cuda:1"), ("cpu:gloo,cuda:nccl", "cpu")]
)
def test_messages_between_hosts_use_a_device_of_the_group(monkeypatch, backends, device):
    """The seed of the module, for a weight on cuda:1."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    with FakeTensorMode():
        x = torch.empty(1, device="cuda:1")
    group: Any = object()
    assert collectives.message_device(x, group) == torch.device(device)
    assert collectives.message_device(x, None) == torch.device("cpu")


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


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "linear_cross_entropy": linear_cross_entropy,
    "linear_cross_entropy_with_metrics": linear_cross_entropy_with_metrics,
    "data_parallel_linear_cross_entropy": partial(
        data_parallel_linear_cross_entropy, data_group=None
    ),
    "linear_logprob": lambda hidden, weight, labels: linear_logprob(
        hidden, weight, labels[:, None]
    ),
    "linear_divergence": lambda hidden, weight, labels: linear_divergence(
        hidden, weight, hidden.detach(), weight.detach()
    ),
    "linear_top_k": lambda hidden, weight, labels: linear_top_k(hidden, weight, 2, labels=labels),
    "linear_sample": lambda hidden, weight, labels: linear_sample(hidden, weight, 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fake_tensors_are_refused_by_name(name):
    """In their mode and outside it; a plan of them is made, as of shapes."""
    with FakeTensorMode() as mode:
        fakes = torch.empty(6, 4), torch.empty(9, 4), torch.zeros(6, dtype=torch.int64)
    for inside in (mode, nullcontext()):
        with inside, pytest.raises(ValueError, match=f"got a FakeTensor: call {name} outside Fake"):
            FUNCTIONS[name](*fakes)
        with inside:
            assert plan(*fakes).tokens == 6


def test_a_layer_made_of_fake_tensors_has_no_values():
    with FakeTensorMode():
        layer = LinearCrossEntropy(4, 9, bias=True)
        assert layer.logits(torch.empty(6, 4)).shape == (6, 9)
        with pytest.raises(ValueError, match="got a FakeTensor: call linear_cross_entropy outside"):
            layer(torch.empty(6, 4), torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize(("schedule", "message"), [
    ("in_forward", "use schedule='recompute'"),
    (filtered.schedule(0.1), r"filtered\.schedule has gradients of the loss only"),
])  # fmt: skip
@pytest.mark.parametrize("name", METRICS)
def test_gradients_of_metrics_are_refused(name, schedule, message):
    inputs, upstream = small("eager"), Upstream(1.0, metric_upstream(37, name))
    with pytest.raises(NotImplementedError, match=message):
        run_op(inputs, upstream, impl="eager", schedule=schedule)
