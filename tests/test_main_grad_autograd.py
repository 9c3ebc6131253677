"""When dweight is added into ``weight.main_grad``, into which buffer, and what autograd gets."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flce_dist import linear_cross_entropy, linear_logprob
from flce_dist.testing import relative_rms, run_ranks
from tests.problems import each_schedule
from tests.test_main_grad import assert_added, loss_of, parameter, problem, step, unfused


@each_schedule
@pytest.mark.parametrize("flag", [True, False])
def test_a_backward_in_two_executions_adds_once(schedule, flag):
    """Zero-bubble pipelines ask for the input's gradient first and for the weight's later.

    They add what the weight gets of a second microbatch to that of the first, in place.
    """
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    inputs = problem()
    weight, dweight = parameter(inputs, flag=flag), unfused(inputs, schedule=schedule)
    expected = step(inputs, parameter(inputs), schedule=schedule)
    for before in range(2):
        hidden = inputs.hidden.clone().requires_grad_()
        loss = loss_of(inputs, weight, 1.0 * hidden, schedule=schedule)
        (dhidden,), groups = stage_backward_input([loss], None, [hidden], iter([weight]))
        assert dhidden is not None and torch.equal(dhidden, expected)
        assert_added(weight, dweight, times=before)
        try:
            stage_backward_weight(iter([weight]), groups)
        except RuntimeError as error:
            if "_input_metadata" not in str(error):
                raise
            version = torch.__version__
            pytest.skip(f"these pipelines of torch {version} take no autograd.Function")
        assert_added(weight, dweight, times=before + 1)
    assert getattr(weight, "grad_added_to_main_grad", None) is (True if flag else None)
    assert not weight.grad.any()


@each_schedule
def test_only_a_backward_that_asks_for_weight_adds(schedule):
    inputs = problem()
    weight, dweight = parameter(inputs, flag=False), unfused(inputs, schedule=schedule)
    hidden = inputs.hidden.clone().requires_grad_()
    loss = loss_of(inputs, weight, hidden, schedule=schedule)
    torch.autograd.grad(loss, hidden, retain_graph=True)
    loss.backward(inputs=[hidden], retain_graph=True)
    assert torch.equal(weight.main_grad, weight.before)
    torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True)
    assert_added(weight, dweight)
    loss.backward(inputs=[weight])
    assert_added(weight, dweight, times=2)


BEHIND: dict[str, Callable[[Any], Any]] = {
    "itself": lambda weight: weight,
    "a view": lambda weight: weight.t().t(),
    "a cast": lambda weight: weight.to(torch.float64).to(torch.float32),
    "a product": lambda weight: weight * torch.ones((), requires_grad=True),
}


@each_schedule
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", BEHIND)
def test_zeros_of_a_weight_that_autocast_casts(name, autocast, flag, schedule):
    """torch.autograd.grad refuses None, and main_grad has dweight by then."""
    inputs = problem()
    leaf = parameter(inputs, flag=flag)
    weight = BEHIND[name](leaf)
    if weight is not leaf:
        vars(weight).update(vars(leaf))
    dweight = unfused(inputs, schedule=schedule)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(inputs, weight, schedule=schedule)

    def assert_zeros_and_added(asked: Any, times: int) -> None:
        (found,) = torch.autograd.grad(loss, asked, retain_graph=True)
        assert found.shape == asked.shape and found.dtype == torch.float32 and not found.any()
        found += 1.0  # a pipeline's next microbatch
        assert not found.std()
        change = weight.main_grad - weight.before
        assert relative_rms(change, times * dweight) < (0.02 if autocast else 1e-5)

    assert_zeros_and_added(weight, 1)
    if name == "a product" and not flag:
        # main_grad is the product's: zeros would be no gradient of its factor.
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss, leaf, retain_graph=True)
    else:
        assert_zeros_and_added(leaf, 2)


@each_schedule
@pytest.mark.parametrize("overwrite", [None, True, False])
def test_a_buffer_that_is_made_in_backward(schedule, overwrite):
    """As with Megatron-FSDP; what is overwritten may hold anything, padding included."""
    inputs = problem()
    weight, dweight = parameter(inputs), unfused(inputs)
    made, before = weight.main_grad, weight.before
    weight.main_grad = None
    weight.get_main_grad = get_main_grad = mock.Mock(return_value=made)
    if overwrite is not None:
        weight.overwrite_main_grad = overwrite
    if overwrite is not False:
        made.fill_(float("nan"))
        before.zero_()
    losses = [loss_of(inputs, weight, schedule=schedule) for _ in range(2)]
    assert not get_main_grad.called
    torch.stack(losses).sum().backward()
    assert weight.main_grad is made
    assert_added(weight, dweight, times=2)
    step(inputs, weight, schedule=schedule)
    assert_added(weight, dweight, times=3 if overwrite is False else 1)


def test_frozen_and_detached_weights_leave_main_grad_alone():
    inputs = problem()
    weight = parameter(inputs)
    step(inputs, weight.detach())
    step(inputs, weight.requires_grad_(False))
    assert torch.equal(weight.main_grad, weight.before)
    assert weight.grad is None and weight.grad_added_to_main_grad is False


def test_autocast_adds_to_the_main_grad_of_the_fp32_weight():
    inputs = problem()
    weight = parameter(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(inputs, weight)
    loss.backward()
    change = weight.main_grad - weight.before
    assert relative_rms(change, unfused(inputs)) < 0.02
    assert weight.grad.dtype == torch.float32 and not weight.grad.any()


def loss_alone(hidden: Any, weight: Any, **options: Any) -> torch.Tensor:
    labels = torch.arange(2 * len(hidden)) % 32
    return linear_cross_entropy(hidden, weight, labels, **options)


def score_alone(hidden: Any, weight: Any, **options: Any) -> torch.Tensor:
    ids = torch.arange(4 * len(hidden)).view(-1, 2) % 32
    del options["schedule"]
    return linear_logprob(hidden, weight, ids, over="ids", **options).logprob.sum()


@pytest.mark.parametrize(
    ("op", "schedule"),
    [(loss_alone, name) for name in ("cached", "recompute", "in_forward")] + [(score_alone, "")],
)
def test_ranks_that_ask_for_other_gradients(op, schedule):
    """The one that wants no dweight makes the same collectives, and adds nothing."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(32, 8, generator=generator, dtype=torch.float64)

    def rank(group: dist.ProcessGroup, adds: bool) -> Any:
        own = hidden[group.rank() * 4 :][:4].clone().requires_grad_()
        rows: Any = weight[group.rank() * 16 :][:16].clone().requires_grad_()
        rows.main_grad = torch.zeros_like(rows)
        options = {"tp_group": group, "sequence_parallel": True, "schedule": schedule}
        loss = op(own, rows, accumulate_dweight=adds, **options)
        wants_dweight = not adds or group.rank() == 1
        asked = [own, rows] if wants_dweight else [own]
        dhidden, *dweight = torch.autograd.grad(loss, asked, allow_unused=True)
        return dhidden, rows.main_grad if adds else dweight[0]

    plain = run_ranks(functools.partial(rank, adds=False), 2)
    found = run_ranks(functools.partial(rank, adds=True), 2)
    for (dhidden, _), (expected, _) in zip(found, plain, strict=True):
        assert torch.equal(dhidden, expected)
    assert not found[0][1].any()
    assert relative_rms(found[1][1], plain[1][1]) <= 1e-14
