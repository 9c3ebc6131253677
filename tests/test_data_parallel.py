"""The vocabulary split over data-parallel ranks: losses of own tokens, and FSDP2's gradients."""

import functools
import itertools
import os
import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import data_parallel_linear_cross_entropy, filtered, linear_cross_entropy
from flce_dist.arguments import rank_check
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import relative_rms, run_ranks
from tests.on_ranks import on_ranks
from tests.outcomes import Outcome, misses
from tests.parallel_problem import SCHEDULES, complaint
from tests.problems import IGNORE, Inputs, Upstream, make_inputs, pairwise, run_reference

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


REFUSED: dict[str, dict[str, Any]] = {
    "unexpected keyword argument 'sequence_dim'": {"sequence_dim": 1},
    "data_group must be None or a torch.distributed.ProcessGroup": {"data_group": "data"},
    r"labels must be \(4,\) from hidden \(4, 16\), got \(2, 2\)": {
        "labels": torch.ones(2, 2).long()
    },
    r"token_weight must be \(4,\), as tokens": {"token_weight": torch.ones(3)},
    "token_weight must be a torch.Tensor, got list": {"token_weight": [1.0]},
    "labels must be a torch.Tensor, got list": {"labels": [1]},
    "hidden must be a torch.Tensor, got list": {"hidden": [1.0]},
    r"hidden must be \[..., H\] with H >= 1, got \(\)": {"hidden": torch.tensor(1.0)},
    "schedule='in_forward' with an upstream gradient of each token": {
        "schedule": "in_forward",
        "reduction": "none",
        "weight": torch.ones(5, H).requires_grad_(),
    },
    "reduction must be one of": {"reduction": "own"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    arguments: dict[str, Any] = dict(
        hidden=torch.ones(4, H), weight=torch.ones(5, H), labels=torch.arange(4), data_group=None
    )
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        data_parallel_linear_cross_entropy(**arguments | REFUSED[message])


DIFFERENCES: dict[str, dict[str, Any]] = {
    "number of labels is 4 on rank 0 and 5 on rank 1; pad labels with ignore_index": {"tokens": 5},
    "labels is 'torch.int64' on rank 0 and 'torch.int32' on rank 1": {
        "labels": torch.arange(4).int()
    },
    "token_weight is None on rank 0 and 'torch.float32' on rank 1": {"token_weight": torch.ones(4)},
    "temperature is 1.0 on rank 0 and 'torch.float32' on rank 1": {"temperature": torch.ones(4)},
    "temperature is 1.0 on rank 0 and 0.5 on rank 1": {"temperature": 0.5},
    "hidden is 'torch.float32' on rank 0 and 'torch.float64' on rank 1": {"dtype": torch.float64},
    "rank 1 raised ValueError: weight must be [V, H]": {"weight": torch.ones(5, H + 1)},
    "rank 1 raised ValueError: token_weight must be (4,)": {"token_weight": torch.ones(3)},
    "bias given is False on rank 0 and True on rank 1": {"bias": torch.zeros(5)},
    "weight.requires_grad is True on rank 0 and False on rank 1": {"weight": torch.ones(5, H)},
    "label_smoothing is 0.0 on rank 0 and 0.1 on rank 1": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize("expected", DIFFERENCES)
def test_ranks_that_differ_are_named_at_the_first_call(expected):
    """Though the group has been compared by another function, and again at the next call."""

    def rank(group: dist.ProcessGroup) -> list[str]:
        mine = dict(DIFFERENCES[expected]) if group.rank() == 1 else {}
        whole = [torch.ones(4, H), torch.ones(5, H), torch.arange(4)]
        linear_cross_entropy(*whole, tp_group=group)
        return [complaint(small, group, **mine) for _ in range(2)]

    with mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_RANKS": "1"}):
        (first, other), (own, again) = run_ranks(rank, 2)
    assert first == other and own == again and own in first
    assert first.startswith(f"ranks must call alike: {expected}")


def test_over_gloo_no_rank_aborts_or_waits():
    def rank(group: dist.ProcessGroup) -> list[str]:
        many = list(DIFFERENCES.values()) if group.rank() == 1 else [{}] * len(DIFFERENCES)
        return [complaint(small, group, **mine) for mine in (*many, {})]

    with mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_RANKS": "1"}):
        for *differing, alike in run_ranks(rank, 2, backend="gloo"):
            assert all(differing) and alike == ""


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_backwards_of_different_calls_are_named(reduction):
    """Rank 1 skips backward of the first of two microbatches."""

    def rank(group: dist.ProcessGroup) -> str:
        losses = [small(group, reduction=reduction)[0].sum() for _ in range(2)]
        with pytest.raises(RuntimeError, match="ranks run backward of different calls") as raised:
            losses[group.rank()].backward()
        return str(raised.value)

    first, second = run_ranks(rank, 2)
    assert first == second and "a rank that skips backward of a loss" in first


def test_microbatches_whose_backwards_follow_all_forwards():
    def rank(group: dist.ProcessGroup) -> list[bool]:
        many = [small(group) for _ in range(3)]
        gradients = [torch.autograd.grad(loss, leaves) for loss, leaves in reversed(many)]
        return [torch.equal(*pair) for pair in zip(gradients[0], gradients[-1], strict=True)]

    assert run_ranks(rank, 2) == [[True, True]] * 2


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_error_of_a_rank_that_waits_in_backward_says_what_to_look_for(goes_on):
    """Rank 1 skips backward, and ends or makes its next call."""

    def rank(group: dist.ProcessGroup) -> str:
        loss, _ = small(group)
        if group.rank() == 0:
            with pytest.raises(RuntimeError) as raised:
                loss.backward()
            return str(raised.value)
        if goes_on:
            with pytest.raises(RuntimeError, match="ranks disagree on a collective"):
                small(group)
        return ""

    said, _ = run_ranks(rank, 2)
    assert "ranks did not meet in backward; a rank that skips backward of a loss" in said


def test_backward_exchanges_one_message():
    def rank(group: Any) -> list[str]:
        loss, _ = small(group)
        before = len(group.calls)
        loss.backward()
        return [call for call in group.calls[before:] if "[2]" in call]

    assert run_ranks(rank, 2) == [["allgather float32[2]"]] * 2


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="Dynamo of this torch takes no hooks of tensors in a graph"
)
@pytest.mark.parametrize("expected", [
    "token_weight is None on rank 0 and 'torch.float32' on rank 1",
    "labels is 'torch.int64' on rank 0 and 'torch.int32' on rank 1",
    "temperature is 1.0 on rank 0 and 0.5 on rank 1",
    "number of labels is 4 on rank 0 and 5 on rank 1; pad labels with ignore_index",
])  # fmt: skip
@on_ranks(2)
def test_compiled_code_compares_before_it_gathers(group, expected):
    call = torch.compile(data_parallel_linear_cross_entropy, backend="aot_eager", fullgraph=True)
    mine = dict(DIFFERENCES[expected]) if group.rank() == 1 else {}
    checks = mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_RANKS": "1"})
    with checks, mock.patch.object(rank_check, "_compared", weakref.WeakKeyDictionary()):
        said = complaint(functools.partial(small, group, call=call, **mine))
        assert said.startswith(f"ranks must call alike: {expected}"), said
        assert complaint(functools.partial(small, group, call=call)) == ""
