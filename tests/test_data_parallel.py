"""The vocabulary split over data-parallel ranks: losses of own tokens, and FSDP2's gradients."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import data_parallel_linear_cross_entropy, filtered, linear_cross_entropy
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import relative_rms, run_ranks
from tests.on_ranks import on_ranks
from tests.outcomes import Outcome, misses
from tests.parallel_problem import SCHEDULES
from tests.problems import (
    IGNORE,
    METRICS,
    Inputs,
    Upstream,
    make_inputs,
    pairwise,
    run_reference,
)

P, T, H, V_ALL, ROWS = 3, 8, 16, 101, 104  # 35, 35, 34 rows, of which three are padding
IGNORING = 1  # a rank whose tokens are all ignored


def whole(dtype: torch.dtype = torch.float32, tokens: int = P * T, spread: float = 2.0) -> Inputs:
    """Inputs of all ranks; the weight has padding."""
    inputs = make_inputs(
        tokens, ROWS, H, dtype, bias=True, token_weight=True, temperature=True, spread=spread
    )
    inputs.labels[inputs.labels >= V_ALL] = 0
    inputs.labels.view(P, -1)[IGNORING] = IGNORE
    return inputs


def part(inputs: Inputs, rank: int, *of_tokens: str) -> Inputs:
    """Return a rank's tokens; those of token_weight and temperature that are named."""
    own: dict[str, Any] = {"bias": inputs.bias, "weight": inputs.weight}
    for name in ("hidden", "labels", *of_tokens):
        own[name] = getattr(inputs, name).tensor_split(P)[rank]
    return Inputs(**own)


def upstream_of(reduction: str, rank: int, tokens: int) -> Tensor:
    """Gradient of a rank's loss: a scalar that is the same on all, or one per token."""
    if reduction != "none":
        return torch.tensor(2.0 * tokens)
    return torch.randn(tokens, generator=torch.Generator().manual_seed(rank))


def expected(inputs: Inputs, of_tokens: tuple[str, ...], options: dict[str, Any]) -> list[Outcome]:
    """Each rank's own loss and dhidden, and the other gradients as their mean over ranks."""
    found = []
    for rank in range(P):
        own = part(inputs, rank, *of_tokens)
        g = Upstream(upstream_of(options["reduction"], rank, len(own.labels)))
        found.append(run_reference(own, g, vocab_size=V_ALL, **options))
    dweight = torch.stack([one.dweight for one in found]).mean(0)
    dbias = torch.stack([one.dbias for one in found]).mean(0)
    return [one.changed(dweight=dweight, dbias=dbias) for one in found]


def step(
    group: dist.ProcessGroup, inputs: Inputs, of_tokens: tuple[str, ...], **options: Any
) -> Outcome:
    rows = vocab_range(ROWS, group.rank(), P)
    own = part(inputs, group.rank(), *of_tokens)
    assert own.bias is not None
    leaves = [own.hidden, own.weight[slice(*rows)], own.bias[slice(*rows)]]
    hidden, weight, bias = (x.clone().requires_grad_() for x in leaves)
    options |= {"vocab_size": V_ALL, "vocab_range": rows, "temperature": own.temperature}
    loss = data_parallel_linear_cross_entropy(
        hidden, weight, own.labels, bias=bias, token_weight=own.token_weight, data_group=group,
        **options,
    )  # fmt: skip
    upstream = upstream_of(options["reduction"], group.rank(), len(hidden)).to(loss.dtype)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias), upstream)
    return Outcome.of(loss, *gradients, calls=tuple(getattr(group, "calls", ())))


def check(inputs: Inputs, of_tokens: tuple[str, ...] = (), **options: Any) -> list[Outcome]:
    """Compare every rank's results with fp64."""
    ours = run_ranks(lambda group: step(group, inputs, of_tokens, **options), P)
    only_ours = "schedule", "max_counted", "tp_invariant"
    plain = {k: x for k, x in options.items() if k not in only_ours}
    truth = expected(inputs.to(torch.float64), of_tokens, plain)
    eager = expected(inputs, of_tokens, plain)
    for rank, one in enumerate(ours):
        rows = slice(*vocab_range(ROWS, rank, P))
        exact, rounded = (x[rank].part(slice(None), rows) for x in (truth, eager))
        exact = exact.without(*METRICS, "correct")
        assert misses(one, exact, rounded, inputs.dtype) == [], f"rank {rank}"
    return ours


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"of_tokens": ("token_weight",), "label_smoothing": 0.1, "z_loss_weight": 0.01},
    "temperatures": {"of_tokens": ("token_weight", "temperature"), "softcap": 3.0},
    "counted": {"of_tokens": ("temperature",), "max_counted": 16},
}
EVERY = itertools.product(SCHEDULES, ["none", "sum", "mean"], EXTRAS)
CASES = [case for case in EVERY if case[:2] != ("in_forward", "none")]


@pytest.mark.parametrize(("schedule", "reduction", "extra"), pairwise(CASES))
def test_own_losses_and_mean_gradients(schedule, reduction, extra):
    ours = check(whole(), schedule=schedule, reduction=reduction, **EXTRAS[extra])
    assert not ours[IGNORING].loss.any() and not ours[IGNORING].dhidden.any()
    assert all(one.calls == ours[0].calls for one in ours)
    assert not any(str(ROWS // P * H) in call for call in ours[0].calls)  # no weight travels


def test_weights_that_are_no_numbers_stay_with_their_rank():
    weights = torch.ones(P * T)
    inputs = replace(whole(), token_weight=weights)
    usual = run_ranks(lambda group: step(group, inputs, ("token_weight",), reduction="mean"), P)
    weights[0] = torch.nan
    found = run_ranks(lambda group: step(group, inputs, ("token_weight",), reduction="mean"), P)
    assert found[0].loss.isnan()
    for one, other in zip(found[1:], usual[1:], strict=True):
        assert torch.equal(one.loss, other.loss) and torch.equal(one.dhidden, other.dhidden)


@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, schedule):
    """The upstream gradient is as large as T; before it, dhidden over T would underflow in fp16."""
    check(whole(dtype, P * 1024, spread=0.005), schedule=schedule, reduction="mean")


def test_filtered_gradients():
    """As of one process with all tokens: tiles of both are the same."""
    inputs = make_inputs(P * T, 3 * 512, H, ignored=0.0)
    labels = inputs.labels % 256  # other tiles may be left out

    def gradients(schedule: Any) -> list[Tensor]:
        hidden, weight = (x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight))
        total = linear_cross_entropy(hidden, weight, labels, reduction="sum", schedule=schedule)
        return list(torch.autograd.grad(total, (hidden, weight)))

    def rank(group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        own = (x.tensor_split(P)[group.rank()].clone() for x in (inputs.hidden, inputs.weight))
        hidden, weight = (x.requires_grad_() for x in own)
        loss = data_parallel_linear_cross_entropy(
            hidden, weight, labels.tensor_split(P)[group.rank()], data_group=group,
            reduction="sum", schedule=filtered.schedule(0.25),
        )  # fmt: skip
        return torch.autograd.grad(loss, (hidden, weight))

    ours = [torch.cat(x) for x in zip(*run_ranks(rank, P), strict=True)]
    dhidden, dweight = gradients(filtered.schedule(0.25))
    assert relative_rms(ours[0], dhidden) < 1e-5 and relative_rms(ours[1], dweight / P) < 1e-5
    assert relative_rms(dweight, gradients("recompute")[1]) > 1e-2


def small(
    group: dist.ProcessGroup | None, tokens: int = 4, **options: Any
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The loss of this rank's tokens, and hidden [tokens, H] and weight [5, H]."""
    g = torch.Generator().manual_seed(0 if group is None else group.rank())
    dtype = options.pop("dtype", torch.float32)
    shapes = (tokens, H), (5, H)
    hidden, weight = (
        torch.randn(*shape, generator=g, dtype=dtype).requires_grad_() for shape in shapes
    )
    hidden = options.pop("hidden", hidden)
    weight = options.pop("weight", weight)
    if options.get("accumulate_dweight"):
        weight.main_grad = torch.zeros_like(weight)
    labels = options.pop("labels", torch.arange(tokens) % 5)
    call = options.pop("call", data_parallel_linear_cross_entropy)
    return call(hidden, weight, labels, data_group=group, **options), (hidden, weight)


@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
def test_upstream_gradients_that_differ_make_nan(schedule):
    def rank(group: dist.ProcessGroup) -> bool:
        loss, leaves = small(group, schedule=schedule)
        gradients = torch.autograd.grad(loss, leaves, loss.new_tensor(1.0 + group.rank()))
        return all(bool(x.isnan().all()) for x in gradients)

    assert all(run_ranks(rank, 2))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_tokens(reduction):
    def rank(group: dist.ProcessGroup) -> bool:
        loss, (_, weight) = small(group, 0, reduction=reduction)
        dweight = torch.autograd.grad(loss.sum(), weight, allow_unused=True)[0]
        return bool(loss.any()) or (dweight is not None and bool(dweight.any()))

    assert not any(run_ranks(rank, 2))


def test_one_process():
    loss, leaves = small(None)
    plain = linear_cross_entropy(*leaves, torch.arange(4))
    assert relative_rms(loss, plain) < 1e-6
    for ours, theirs in zip(*(torch.autograd.grad(x, leaves) for x in (loss, plain)), strict=True):
        assert relative_rms(ours, theirs) < 1e-6


@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
def test_main_grad_gets_the_mean(schedule):
    def rank(group: dist.ProcessGroup) -> float:
        loss, (_, plain) = small(group, schedule=schedule)
        other, (_, weight) = small(group, schedule=schedule, accumulate_dweight=True)
        (loss + other).backward()
        assert weight.grad is None and plain.grad is not None
        return relative_rms(weight.main_grad, plain.grad)  # type: ignore[attr-defined]

    assert max(run_ranks(rank, 2)) < 1e-6


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="Dynamo of this torch takes no hooks of tensors in a graph"
)
@on_ranks(2)
def test_compiled(group):
    call = torch.compile(data_parallel_linear_cross_entropy, backend="aot_eager", fullgraph=True)
    loss, leaves = small(group)
    found, others = small(group, call=call)
    assert torch.equal(loss, found)
    expected, gradients = torch.autograd.grad(loss, leaves), torch.autograd.grad(found, others)
    assert all(torch.equal(*pair) for pair in zip(expected, gradients, strict=True))
