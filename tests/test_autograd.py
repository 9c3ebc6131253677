"""The op within autograd: frozen operands, second passes, changes in place, autocast, activation
checkpointing, another current device.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flce_dist import filtered, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.kernels import eager, gpu
from flce_dist.parallel import collectives
from flce_dist.testing import relative_rms
from tests.devices import our_call
from tests.flops import gemms_of
from tests.function_calls import CALLS
from tests.problems import (
    SCHEDULES,
    Upstream,
    both,
    device_of,
    each_schedule,
    everywhere,
    graph,
    make_inputs,
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
        for wide in ("hidden", "weight"):
            narrow = {"hidden": "weight", "weight": "hidden"}[wide]
            mixed = replace(inputs, **{narrow: getattr(inputs, narrow).float()})
            with pytest.raises(ValueError, match=rf"pass {wide}\.float\(\), since torch\.autocast"):
                linear_cross_entropy(mixed.hidden, mixed.weight, mixed.labels)
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


@pytest.mark.parametrize(
    "name", [name for name in CALLS if name not in ("linear_top_k", "linear_sample")]
)
def test_selective_checkpoints_that_keep_matrix_products(name):
    """They refuse a product that is changed in place."""
    inputs = small("eager")
    ids = inputs.labels.clamp(min=0)
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, products)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        found = CALLS[name](hidden * 1.5, weight, ids)
        return found.sum() if isinstance(found, Tensor) else found[0].sum()

    steps = loss, partial(checkpoint, loss, use_reentrant=False, context_fn=contexts)
    of_steps = []
    for step in steps:
        leaves = [x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight)]
        of_steps.append(torch.autograd.grad(step(*leaves), leaves))
    assert all(torch.equal(x, y) for x, y in zip(*of_steps, strict=True))


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
