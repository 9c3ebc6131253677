"""Calls that are rare and must be right on a GPU: hopeless labels, empty shards, odd tensors.

Those that a CPU can run, too, prove their checks there. T tokens, V vocabulary rows, H hidden size.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import linear_cross_entropy
from flce_dist.kernels.token_loss_formulas import RESCUE_ABOVE
from flce_dist.memory import peak_memory
from flce_dist.testing import relative_rms, run_ranks
from tests.parallel_problem import Problem, joined, misses, rank_step
from tests.problems import Inputs, Outcome, Upstream, assert_same, each_dtype, each_schedule, run
from tests.test_gpu_oracle import (
    EVERY_SCHEDULE,
    aim,
    assert_gradients_close,
    assert_loss_close,
    each_device,
    inputs_on,
    on_cuda,
    options_of,
    our_call,
    textbook_in_chunks,
)

FILTERED = {"filter_eps": 2.0**-9}
# Of calls whose results are compared among themselves.
WAYS: dict[str, dict[str, Any]] = {
    **{name: {"schedule": name} for name in EVERY_SCHEDULE},
    "filtered": FILTERED,
}
each_way = pytest.mark.parametrize("way", WAYS)


# --- labels far below the largest logit

HOPELESS = {"one": slice(300, 301), "one of each block": slice(5, None, 128), "all": slice(None)}


def hopeless_inputs(device: str, dtype: torch.dtype, where: slice) -> Inputs:
    """Inputs of which some have a label more than ``RESCUE_ABOVE`` below the largest logit."""
    T, V = (1000, 3000) if device == "cuda" else (400, 300)
    inputs = inputs_on(device, T, V, 64, dtype, ignored=0.0)
    far = aim(inputs, -1.5 * RESCUE_ABOVE)
    hidden = inputs.hidden.clone()
    hidden[where] = far.hidden[where]
    inputs = replace(inputs, hidden=hidden)
    z = hidden.double() @ inputs.weight.double().T
    below = z.amax(1) - z.gather(1, inputs.labels[:, None])[:, 0]
    flagged = below > RESCUE_ABOVE
    assert flagged[where].all() and flagged.sum() == len(hidden[where])
    return inputs


def check_hopeless(actual: Outcome, inputs: Inputs, where: slice, dtype: torch.dtype) -> None:
    """Everything, then the hopeless tokens and the others on their own."""
    truth, eager = (textbook_in_chunks(inputs, kind) for kind in (torch.float64, dtype))
    assert_loss_close(actual["loss"], truth["loss"])
    assert_gradients_close(actual, truth, eager, dtype)
    hopeless = torch.zeros_like(inputs.labels, dtype=torch.bool)
    hopeless[where] = True
    for tokens in (hopeless, ~hopeless):
        if tokens.any():
            mine, fp64, rounded = (
                {"dhidden": x["dhidden"][tokens]} for x in (actual, truth, eager)
            )
            assert_gradients_close(mine, fp64, rounded, dtype, ("dhidden",))
            assert_loss_close(actual["loss"][tokens], truth["loss"][tokens])


@each_device
@each_dtype
@pytest.mark.parametrize("schedule", ["recompute", "cached", "auto"])
@pytest.mark.parametrize("name", HOPELESS)
def test_labels_far_below_the_largest_logit(name, schedule, dtype, device):
    where = HOPELESS[name]
    inputs = hopeless_inputs(device, dtype, where)
    options = options_of(schedule, inputs)
    actual = run(our_call, inputs, Upstream(), reduction="none", **options)
    check_hopeless(actual, inputs, where, dtype)
    for spoilt in ("loss", "dhidden"):
        wrong = actual[spoilt].clone()
        wrong[where] *= 0.9
        with pytest.raises(AssertionError, match="exceeds"):
            check_hopeless({**actual, spoilt: wrong}, inputs, where, dtype)


@each_device
@each_dtype
@pytest.mark.parametrize("name", HOPELESS)
def test_a_mean_with_labels_far_below_the_largest_logit(name, dtype, device):
    """in_forward, which is what ``auto`` is for a mean."""
    inputs = hopeless_inputs(device, dtype, HOPELESS[name])
    T = len(inputs.labels)
    truth, eager = (textbook_in_chunks(inputs, kind) for kind in (torch.float64, dtype))
    actual = run(our_call, inputs, Upstream(float(T)), schedule="in_forward")
    assert_loss_close(actual["loss"], truth["loss"].mean())
    assert_gradients_close(actual, truth, eager, dtype)


# --- nothing to compute

each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
MANY: dict[str, Any] = {"label_smoothing": 0.1, "z_loss_weight": 1e-3}


@each_device
@each_half
@each_way
@pytest.mark.parametrize("options", [{}, MANY], ids=["plain", "many"])
def test_without_tokens_gradients_are_zero(options, way, dtype, device):
    inputs = inputs_on(device, 0, 700, 64, dtype, bias=True)
    actual = run(our_call, inputs, Upstream(3.0), **options, **WAYS[way])
    for name, result in actual.items():
        assert (result == 0).all(), name
    assert [actual[f"d{x}"].shape for x in ("hidden", "weight", "bias")] == [
        (0, 64), (700, 64), (700,)
    ]  # fmt: skip


@each_device
@each_half
@each_way
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_rank_without_rows(sequence_parallel, way, dtype, device, one_launch_at_a_time):
    """The second of two threads has padding alone; gradients are still the formula's."""
    problem = Problem(T=48, H=64, V_all=100, rows=200, dtype=dtype, device=device, options=MANY)
    # All that there is of so few columns is kept.
    options = {**WAYS[way], "sequence_parallel": sequence_parallel}
    one, other = run_ranks(lambda group: rank_step(group, problem, **options), 2)
    assert misses(joined([one, other], sequence_parallel=sequence_parallel), problem) == []
    assert not other.dweight.any() and not other.dbias.any()
    spoilt = one._replace(dbias=0 * one.dbias)
    assert misses(joined([spoilt, other], sequence_parallel=sequence_parallel), problem)


# --- a group of one rank


@contextmanager
def group_of_one(device: str) -> Iterator[dist.ProcessGroup]:
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def what_runs(inputs: Inputs, **options: Any) -> tuple[Outcome, Counter[str], int]:
    """Results, kernels and copies by name, and peak memory; the second time, all being there."""
    on_gpu = inputs.hidden.is_cuda
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    for _ in range(2):
        with peak_memory(inputs.hidden.device) as peak:
            results = run(our_call, inputs, Upstream(), **options)
    with torch.profiler.profile(activities=[kind]) as profiler:
        run(our_call, inputs, Upstream(), **options)
        if on_gpu:
            torch.cuda.synchronize()
    device_type = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    names = (event.name for event in profiler.events() or () if event.device_type == device_type)
    return results, Counter(names), peak.bytes


@on_cuda
@each_way
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_group_of_one_rank_is_no_group(sequence_parallel, way, device):
    inputs = inputs_on(device, 4096, 5000, 1024, torch.bfloat16, bias=True)
    alone = what_runs(inputs, **WAYS[way])
    with group_of_one(device) as group:
        options = {"tp_group": group, "sequence_parallel": sequence_parallel, **WAYS[way]}
        grouped = what_runs(inputs, **options)
    assert_same(grouped[0], alone[0])
    assert grouped[1] == alone[1] and sum(alone[1].values()) > 3
    assert 0 < grouped[2] <= alone[2] + (1 << 20)  # hidden has 8 MiB


# --- main_grad, and a node that runs twice


def parameter(weight: Tensor, main_grad: Tensor) -> Any:
    found: Any = weight.clone().requires_grad_()
    found.main_grad = main_grad
    return found


@each_device
@each_way
def test_columns_beside_main_grad_are_left_alone(way, device):
    inputs = inputs_on(device, 130, 700, 64, torch.bfloat16)
    expected = run(our_call, inputs, Upstream(), **WAYS[way])["dweight"].double()
    wider = torch.zeros(700, 200, device=device)
    weight, options = parameter(inputs.weight, wider[:, 50:114]), WAYS[way]
    linear_cross_entropy(
        inputs.hidden, weight, inputs.labels, accumulate_dweight=True, **options
    ).backward()
    assert relative_rms(weight.main_grad, expected) < 2 * torch.finfo(torch.bfloat16).eps
    assert not wider[:, :50].any() and not wider[:, 114:].any()


@on_cuda
@each_way
@pytest.mark.parametrize("kind", ["every other column", "another device"])
def test_a_main_grad_that_cannot_be_written_is_refused(kind, way, device):
    inputs = inputs_on(device, 130, 700, 64, torch.bfloat16)
    memory = torch.zeros(700, 128, device=device)
    main_grad, what = memory[:, ::2], r"strides \(128, 2\)"
    if kind == "another device":
        main_grad, what = torch.zeros(700, 64), "cpu"
    weight = parameter(inputs.weight, main_grad)
    with pytest.raises(ValueError, match=rf"weight\.main_grad must .* got .*{what}"):
        linear_cross_entropy(
            inputs.hidden, weight, inputs.labels, accumulate_dweight=True, **WAYS[way]
        ).backward()
    assert not memory.any() and not main_grad.any()


@on_cuda
@each_way
def test_a_backward_that_does_not_ask_for_weight_adds_nothing(way, device):
    inputs = inputs_on(device, 130, 700, 64, torch.bfloat16)
    expected = run(our_call, inputs, Upstream(), **WAYS[way])["dweight"].double()
    weight = parameter(inputs.weight, torch.zeros(700, 64, device=device))
    hidden, options = inputs.hidden.clone().requires_grad_(), WAYS[way]
    loss = linear_cross_entropy(hidden, weight, inputs.labels, accumulate_dweight=True, **options)
    torch.autograd.grad(loss, hidden, retain_graph=True)
    assert not weight.main_grad.any()
    loss.backward(inputs=[weight])
    assert relative_rms(weight.main_grad, expected) < 2 * torch.finfo(torch.bfloat16).eps


@each_device
@each_way
def test_a_node_that_runs_once_for_each_gradient(way, device):
    """As where input gradients are needed first and those of weights later."""
    inputs = inputs_on(device, 130, 700, 64, torch.bfloat16)
    expected = run(our_call, inputs, Upstream(), **WAYS[way])
    hidden, weight = (x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
    loss = linear_cross_entropy(hidden, weight, inputs.labels, **WAYS[way])
    (dhidden,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (dweight,) = torch.autograd.grad(loss, weight)
    for name, result in (("dhidden", dhidden), ("dweight", dweight)):
        assert relative_rms(result, expected[name]) < torch.finfo(torch.bfloat16).eps, name


# --- the negative bit


def negative(x: Tensor) -> Tensor:
    """The numbers of ``x``, stored with the other sign behind PyTorch's negative bit."""
    lazy = torch._neg_view(-x)
    assert lazy.is_neg() and torch.equal(lazy.resolve_neg(), x)
    return lazy


@each_device
@each_dtype
@each_schedule
@pytest.mark.parametrize("which", ["hidden", "weight", "bias", "token_weight", "upstream"])
def test_the_negative_bit_is_read(which, schedule, dtype, device):
    inputs = inputs_on(device, 130, 700, 64, dtype, bias=True, token_weight=True)
    upstream = torch.tensor(0.7, device=device)

    def results(lazy: bool) -> list[Tensor]:
        given = {name: x.clone() for name, x in vars(inputs).items()} | {"upstream": upstream}
        if lazy:
            given[which] = negative(given[which])
        g, labels = given.pop("upstream"), given.pop("labels")
        leaves = [given[name].requires_grad_() for name in ("hidden", "weight", "bias")]
        loss = linear_cross_entropy(labels=labels, schedule=schedule, **given)
        return [loss.detach(), *torch.autograd.grad(loss, leaves, g)]

    for one, other in zip(results(True), results(False), strict=True):
        assert torch.equal(one, other)
