"""The op within autocast, activation checkpointing, evaluation and another current device."""

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
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flce_dist import linear_cross_entropy
from flce_dist.kernels import eager, gpu
from flce_dist.parallel import collectives
from tests.problems import Upstream, each_schedule, everywhere, run, run_op, small
from tests.test_autograd import graph
from tests.test_gpu_oracle import our_call

# --- autocast


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
        for name, leaf, *gradients in zip(
            ("dhidden", "dweight", "dbias"), leaves, inside, outside, strict=True
        ):
            expected = by_hand[name].to(leaf.dtype)
            for gradient in gradients:
                assert gradient.dtype == leaf.dtype and torch.equal(gradient.cpu(), expected), name


def test_autocast_leaves_fp64_alone():
    inputs = small("eager").to(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels)
        assert F.linear(inputs.hidden, inputs.weight).dtype == torch.float64
    assert loss.dtype == torch.float64


# --- checkpointing and evaluation


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


# --- the current device, on which Triton launches; test_gpu_execution.py needs two GPUs


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
