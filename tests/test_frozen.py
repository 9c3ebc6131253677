"""A frozen head: hidden alone needs a gradient, so forward makes all of it but tokens' factors."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flce_dist import data_parallel_linear_cross_entropy, linear_cross_entropy
from flce_dist.arguments.options import Reduction
from flce_dist.kernels.logits.eager import SCRATCH_BYTES
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.reference import reference_linear_cross_entropy
from flce_dist.schedules import choose, fit
from flce_dist.schedules.in_forward import InForward
from flce_dist.testing import run_ranks
from tests.outcomes import Outcome, misses
from tests.parallel_problem import EVEN, PADDED, UNEVEN, Problem, joined, rank_step, share_of
from tests.problems import (
    DTYPES,
    Inputs,
    Patch,
    both,
    each_dtype,
    make_inputs,
    per_token_upstream,
    sizes_of_d,
)

T, V, H = 60, 300, 24

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing, z-loss": {"label_smoothing": 0.1, "z_loss_weight": 0.01, "vocab_size": V - 9},
    "softcap": {"softcap": 4.0, "logit_scale": 0.7},
    "counted": {"max_counted": 50},
    "skips": {"skip_ignored": True},
}


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choose, "FROZEN_LOGITS_BYTES", 16 * V * 4)
    monkeypatch.setattr(fit, "_TILE", 8)
    yield


def step(call: Any, inputs: Inputs, upstream: Tensor, **options: Any) -> Outcome:
    hidden = inputs.hidden.clone().requires_grad_()
    loss = call(
        hidden, inputs.weight, inputs.labels, bias=inputs.bias, token_weight=inputs.token_weight,
        temperature=inputs.temperature, **options,
    )  # fmt: skip
    if isinstance(loss, tuple):  # the reference's, with metrics
        loss = loss[0]
    (dhidden,) = torch.autograd.grad(loss, hidden, upstream.to(loss.dtype).expand_as(loss))
    return Outcome(loss=loss.detach(), dhidden=dhidden)


def check(inputs: Inputs, upstream: Tensor, *, impl: str, **options: Any) -> None:
    actual = step(linear_cross_entropy, inputs, upstream, impl=impl, **options)
    of_both = {k: x for k, x in options.items() if k not in ("max_counted", "skip_ignored")}
    of_both.pop("schedule", None)
    exact = inputs.to(torch.float64)
    truth = step(reference_linear_cross_entropy, exact, upstream, **of_both)
    rounded = step(reference_linear_cross_entropy, inputs, upstream, **of_both)
    assert misses(actual, truth, rounded, inputs.dtype) == []


@both
@each_dtype
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("schedule", ["auto", "in_forward"])
def test_each_token_has_its_own_upstream_gradient(schedule, name, dtype, impl):
    inputs = make_inputs(T, V, H, dtype, bias=True, token_weight=True, temperature=True)
    inputs = replace(inputs, labels=inputs.labels.clamp(max=V - 10))
    upstream = per_token_upstream(T)
    how = {"reduction": "none", "schedule": schedule, **OPTIONS[name]}
    check(inputs, upstream, impl=impl, **how)


@both
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_upstream_gradient(reduction, dtype, impl):
    inputs = make_inputs(T, V, H, dtype, bias=True)
    check(inputs, torch.tensor(0.3), impl=impl, reduction=reduction)


@both
def test_upstream_gradients_of_ignored_tokens_are_not_read(impl):
    inputs = make_inputs(T, V, H)
    upstream = per_token_upstream(T)
    expected = step(linear_cross_entropy, inputs, upstream, impl=impl, reduction="none")
    upstream[inputs.labels < 0] = torch.nan
    found = step(linear_cross_entropy, inputs, upstream, impl=impl, reduction="none")
    assert torch.equal(found.dhidden, expected.dhidden)


def test_a_second_backward_gives_the_same():
    inputs = make_inputs(T, V, H, torch.bfloat16)
    hidden = inputs.hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, inputs.weight, inputs.labels, reduction="none")
    upstream = per_token_upstream(T)
    first = torch.autograd.grad(loss, hidden, upstream, retain_graph=True)
    second = torch.autograd.grad(loss, hidden, upstream)
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_logits_are_computed_once_and_multiplied_once(mutate: Patch, reduction: str) -> None:
    """No column of D is computed in backward, and each is an operand of one GEMM."""
    sizes = sizes_of_d(mutate)
    step(linear_cross_entropy, make_inputs(T, V, H), torch.tensor(0.5), reduction=reduction)
    assert sum(sizes) == T * V and len(sizes) > 2


def test_memory_is_a_chunk_and_dhidden():
    shape, budget = (8192, 4096, 32), 4 << 20
    inputs = make_inputs(*shape, torch.bfloat16)
    upstream = per_token_upstream(shape[0])
    options = {"reduction": "none", "max_logits_bytes": budget}
    with peak_memory("cpu") as peak:
        step(linear_cross_entropy, inputs, upstream, **options)
    exponentials = shape[0] * shape[1] * 2  # of all tokens, in 16 bits
    assert peak.bytes < budget + 3 * SCRATCH_BYTES < exponentials / 2


RANKS = [
    *itertools.product([EVEN, UNEVEN, PADDED], [1, 2], [True, False], ["none", "mean"]),
]


def times_each(*args: Any, **options: Any) -> Tensor:
    """The loss; of each token's, a sum with factors of their own."""
    loss = linear_cross_entropy(*args, **options)
    return loss if loss.dim() == 0 else (loss * per_token_upstream(len(loss))).sum()


@pytest.mark.parametrize(("problem", "P", "sequence_parallel", "reduction"), RANKS, ids=str)
def test_ranks(problem: Problem, P: int, sequence_parallel: bool, reduction: str) -> None:
    how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "reduction": reduction}
    frozen = ["weight", "bias"]
    how["call"] = times_each
    ranks = run_ranks(lambda group: rank_step(group, problem, frozen=frozen, **how), P)
    found = joined(ranks, sequence_parallel=sequence_parallel)
    how |= {"schedule": "recompute", "sequence_parallel": False}
    expected = rank_step(None, problem, **how)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.dhidden, expected.dhidden)
    assert not found.dweight.any()


def test_backward_has_no_collective_under_sequence_parallelism():
    def rank(group: Any) -> tuple[Any, Any]:
        share = share_of(group, EVEN, sequence_parallel=True)
        share.leaves(frozen=["weight", "bias"])
        loss = share.loss(group, EVEN, sequence_parallel=True, call=times_each, reduction="none")
        forward = tuple(group.calls)
        loss.backward()
        return forward, tuple(group.calls)

    for forward, whole in run_ranks(rank, 2):
        assert forward == whole and sum("scatter" in call for call in forward) >= 1


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_data_parallel_ranks(reduction: Reduction) -> None:
    """As each rank's own call with the whole weight: tokens differ, upstream gradients too."""
    _, weight, bias, _ = EVEN.tensors

    def rank(group: Any) -> list[Any]:
        inputs = make_inputs(12, EVEN.V_all, EVEN.H, seed=group.rank())
        hidden = inputs.hidden.requires_grad_()
        found = []
        for call, given in (
            (linear_cross_entropy, (weight, bias)),
            (
                partial(data_parallel_linear_cross_entropy, data_group=group),
                [x.chunk(2)[group.rank()].clone() for x in (weight, bias)],
            ),
        ):
            loss = call(hidden, given[0], inputs.labels, bias=given[1], reduction=reduction)
            total = (loss * torch.linspace(0.5, 2.0, loss.numel()).view(loss.shape)).sum()
            found.append((loss.detach(), torch.autograd.grad(total, hidden)[0]))
        return found

    for alone, shared in run_ranks(rank, 2):
        torch.testing.assert_close(shared, alone)


def test_what_else_needs_a_gradient_takes_another_schedule():
    inputs = make_inputs(T, V, H, bias=True)
    hidden = inputs.hidden.requires_grad_()
    bias = inputs.bias
    assert bias is not None
    with pytest.raises(NotImplementedError, match="weight and bias that need no gradient"):
        linear_cross_entropy(
            hidden, inputs.weight, inputs.labels, bias=bias.requires_grad_(), reduction="none",
            schedule="in_forward",
        )  # fmt: skip


def test_the_plan_holds_a_quarter_of_a_gib_of_logits(monkeypatch):
    monkeypatch.undo()
    for tokens in (1024, 8192, 131_072):
        chosen = choose.choose_schedule(
            T=tokens, V=128_256, itemsize=2, schedule="auto", max_logits_bytes=None, frozen=True
        )
        assert isinstance(chosen, InForward)
        assert chosen.logits_bytes <= 256 << 20
        assert min(end - start for start, end in chosen.chunks()) >= min(tokens, 768)


def test_one_graph_for_any_number_of_tokens():
    """Compiled, with other tokens in each call: the same bits, and no graph for each number."""

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(2.0 * hidden, weight, labels, reduction="none")

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for n in (20, 33, 50, 91):
        inputs, upstream = make_inputs(n, V, H), per_token_upstream(n)
        found = []
        for function in (loss_of, compiled):
            hidden = inputs.hidden.clone().requires_grad_()
            loss = function(hidden, inputs.weight, inputs.labels)
            found.append((loss, torch.autograd.grad(loss, hidden, upstream)[0]))
        for ours, expected in zip(*found, strict=True):
            assert torch.equal(ours, expected)
    assert counter.frame_count == 2
