"""Data-parallel ranks that share the vocabulary: what is refused, and what they must do alike."""

import functools
import os
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from flce_dist import data_parallel_linear_cross_entropy, linear_cross_entropy
from flce_dist.arguments import rank_check
from flce_dist.testing import run_ranks
from tests.on_ranks import on_ranks
from tests.parallel_problem import complaint
from tests.test_data_parallel import H, small

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
    r"hidden must be \[..., H\] with H >= 1, got \(4, 0\)": {"hidden": torch.ones(4, 0)},
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


def of_rank_1(x: torch.Tensor, value: float) -> Any:
    """A change to what rank 1 passes: this value at its token 2."""

    def changed(group: dist.ProcessGroup, mesh: DeviceMesh) -> torch.Tensor:
        return x.index_fill(0, torch.tensor([2]), value) if group.rank() == 1 else x

    return changed


def placed(x: torch.Tensor, placement: Placement) -> Any:
    return lambda group, mesh: DTensor.from_local(x, mesh, [placement])


OF_OTHER_ROWS = (
    "must be a plain tensor or a DTensor with Shard(dim=0) over data_group's ranks [0, 1] and "
    "replicated over other ranks, got (Replicate(),) on DeviceMesh"
)
IN_THE_CALLERS_WORDS: dict[str, tuple[str, Any]] = {
    "labels must be within [0, 10) or ignore_index -100, got 77 at token 2 of rank 1: weight has "
    "10 rows on the 2 ranks of data_group together, ": ("labels", of_rank_1(torch.arange(4), 77)),
    "temperature must be finite and above 0 for each token that counts, got 0, infinity, NaN or a "
    "negative number at token 2 of rank 1": ("temperature", of_rank_1(torch.ones(4), 0)),
    "max_counted must be at least the 8 tokens that count on all ranks, got 3": ("max_counted", 3),
    "vocab_size must be within [1, 10], the rows of 2 shards of 5, got 11: data_group must be all ":
        ("vocab_size", 11),
    f"weight {OF_OTHER_ROWS}": ("weight", placed(torch.ones(5, H), Replicate())),
    f"bias {OF_OTHER_ROWS}": ("bias", placed(torch.ones(5), Replicate())),
    **{
        f"{name} must be a plain tensor of this rank's tokens, got a DTensor: pass "
        f"{name}.to_local()": (name, placed(x, Shard(0)))
        for name, x in {
            "hidden": torch.ones(4, H),
            "labels": torch.arange(4),
            "token_weight": torch.ones(4),
            "temperature": torch.ones(4),
        }.items()
    },
}  # fmt: skip


@on_ranks(2)
def test_errors_speak_of_what_the_caller_passed(group):
    """Its own group, and a token by its rank and its place there; the same on all ranks."""
    mesh = init_device_mesh("cpu", (2,))
    for reduction in ("mean", "none"):
        for expected, (name, value) in IN_THE_CALLERS_WORDS.items():
            value = value(group, mesh) if callable(value) else value
            said = complaint(small, group, reduction=reduction, **{name: value})
            assert said.startswith(expected), said
            assert "tp_group" not in said and "sequence_parallel" not in said


def test_the_whole_weight_on_each_rank():
    def rank(group: dist.ProcessGroup) -> str:
        weight = torch.arange(5.0)[:, None].expand(5, H)
        return complaint(small, group, weight=weight)

    with mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_RANKS": "1"}):
        first, second = run_ranks(rank, 2)
    assert first == second and "cut it, or pass data_group=None. If" in first


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
