"""Ranks whose first call differs are told so, all of them, and what differs is named.

Also values that they must share, and rows of the weight that they must not.
test_rank_check_when.py has which calls are compared, and what one rank alone refuses.
"""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist import (
    LinearCrossEntropy,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
    linear_logprob,
)
from flce_dist.arguments import rank_check
from flce_dist.arguments.options import LossOptions
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import run_ranks
from tests.parallel_problem import complaint
from tests.rank_calls import (
    BEGINS,
    F64,
    ROWS,
    V_ALL,
    H,
    T,
    call,
    complaint_of_all,
    complaint_of_rank,
    leaf,
)
from tests.test_options import CHANGED

pytestmark = pytest.mark.usefixtures("ranks_compared")

# Of these every rank names the value; others have consequences that come first.
ALONE = {"vocab_size", "vocab_range", "sequence_parallel", "sequence_dim", "tp_invariant", "impl"}
OPTIONS = {k: x for k, x in CHANGED.items() if k not in {*ALONE, "accumulate_dweight"}}

# What is named, with the others' value and that of rank 1 of 3; what that rank gives.
DISAGREEMENTS: list[tuple[dict[str, tuple[Any, Any]], dict[str, Any]]] = [
    (
        {"hidden.shape": ([12, 8], [10, 8]), "tokens": (12, 10)},
        dict(
            hidden=leaf(T - 2, H),
            labels=torch.arange(T - 2),
            token_weight=torch.ones(T - 2),
            temperature=0.7,
        ),
    ),
    (
        {"dtype": ("torch.float32", "torch.float64"), "bias given": (True, False)},
        dict(hidden=leaf(T, H, dtype=F64), weight=leaf(ROWS, H, dtype=F64), bias=None),
    ),
    ({"token_weight given": (True, False)}, dict(token_weight=None)),
    ({"temperature given": (True, False)}, dict(temperature=1.0)),
    ({"hidden.requires_grad": (True, False)}, dict(hidden=torch.zeros(T, H))),
    ({"weight.requires_grad": (True, False)}, dict(weight=torch.zeros(ROWS, H))),
    ({"bias.requires_grad": (False, True)}, dict(bias=leaf(ROWS))),
    ({"vocab_size": (20, 21)}, dict(vocab_size=V_ALL + 1)),
    ({"vocab_range given": (True, False)}, dict(vocab_range=None)),
    ({"impl": ("eager", "triton")}, dict(impl="triton")),
    (
        {"hidden.shape": ([12, 8], [4, 8]), "sequence_parallel": (False, True)},
        dict(hidden=leaf(T // 3, H), sequence_parallel=True),
    ),
    *(({k: (getattr(LossOptions, k), x)}, {k: x}) for k, x in OPTIONS.items()),
]


@pytest.mark.parametrize(("named", "changes"), DISAGREEMENTS, ids=str)
def test_every_rank_names_what_differs(named, changes):
    said = BEGINS + "; ".join(
        f"{name} is {usual!r} on ranks 0, 2 and {odd!r} on rank 1"
        for name, (usual, odd) in named.items()
    )
    hint = "; labels are those of all tokens of tp_group" if "tokens" in named else ""
    assert complaint_of_all(changes).startswith(said + hint)


def test_rows_that_do_not_meet_are_named():
    said = complaint_of_all(dict(vocab_range=(7, 15), weight=leaf(8, H), bias=torch.zeros(8)))
    expected = "of rank 2 must begin at 15, where those of rank 1 end, got (14, 20)"
    assert said == f"{BEGINS}vocabulary rows {expected}"


def test_one_rank_without_gradients_is_named():
    def rank(group: dist.ProcessGroup) -> str:
        with torch.set_grad_enabled(group.rank() != 1):
            return complaint_of_rank(group, 0, {})

    (said,) = set(run_ranks(rank, 2))  # threads have a grad mode of their own
    assert said.startswith(f"{BEGINS}hidden.requires_grad is True on rank 0 and False on rank 1")


OTHERS = [(), ("weight",), ("bias",), ("hidden", "weight"), ("hidden", "bias")]


@pytest.mark.parametrize(
    "function", [linear_cross_entropy, linear_cross_entropy_with_metrics, linear_logprob]
)
@pytest.mark.parametrize("trained", OTHERS, ids=str)
def test_a_rank_whose_head_is_not_frozen_as_the_others_is_named(function, trained):
    """A frozen head has collectives of its own, so no rank may begin."""

    def rank(group: dist.ProcessGroup) -> str:
        given = call(group.rank(), group.size())
        mine = trained if group.rank() == 1 else ("hidden",)
        for name in ("hidden", "weight", "bias"):
            given[name].requires_grad_(name in mine)
        labels = given.pop("labels")
        if function is linear_logprob:
            del given["token_weight"]
            return complaint(function, ids=labels[:, None], **given, tp_group=group)
        return complaint(function, labels=labels, **given, tp_group=group)

    (said,) = set(run_ranks(rank, 3))
    differ = sorted({"hidden"} ^ set(trained), key=["hidden", "weight", "bias"].index)
    assert said.startswith(f"{BEGINS}{differ[0]}.requires_grad is ")
    assert re.findall(r"(\w+)\.requires_grad is", said) == differ


AGREEMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all ignored": dict(labels=torch.full((T,), -100)),
    "options": {k: v for k, v in OPTIONS.items() if k not in ("softcap", "reduce_dhidden")},
    "no tokens": dict(hidden=leaf(0, H), labels=torch.arange(0), token_weight=None),
}


@pytest.mark.parametrize("P", [1, 3, 7])
@pytest.mark.parametrize("case", AGREEMENTS)
def test_ranks_that_agree_pass(case, P):
    def rank(group: dist.ProcessGroup) -> None:
        linear_cross_entropy(**call(group.rank(), P) | AGREEMENTS[case], tp_group=group)

    run_ranks(rank, P)


def test_padding_anywhere_and_equal_numbers_of_other_types_agree():
    def rank(group: dist.ProcessGroup) -> str:
        start, end = rows = [(0, 10), (10, 24), (20, 26)][group.rank()]
        changes = dict(weight=leaf(end - start, H), bias=None, vocab_range=rows)
        return complaint_of_rank(group, group.rank(), changes)

    assert run_ranks(rank, 3) == [""] * 3
    assert (
        complaint_of_all(dict(label_smoothing=0, logit_scale=1, labels=torch.arange(T).int())) == ""
    )


def test_ids_of_scores_are_compared():
    def rank(group: dist.ProcessGroup) -> str:
        ids = torch.arange(2 * T).view(T, 2) // 2 + group.rank()
        of_none = complaint(linear_logprob, hidden, hidden, ids[:, :0], tp_group=group)
        rank_check._compared.clear()
        return of_none + complaint(linear_logprob, hidden, hidden, ids, tp_group=group)

    hidden = torch.ones(T, 4)
    assert all(said.startswith(f"{BEGINS}hash of ids is ") for said in run_ranks(rank, 2))


@pytest.mark.parametrize(("name", "other"), [
    ("labels", torch.arange(T).flip(0)),
    ("token_weight", torch.linspace(0, 1, T)),
    ("temperature", 0.6),
])  # fmt: skip
def test_values_that_all_must_share_are_compared(name, other):
    said = complaint_of_all({name: other})
    assert said.startswith(f"{BEGINS}hash of {name} is '")
    assert ("are no tp_group, but the data_group" in said) == (name == "labels")


WHOLE = torch.randn(V_ALL, H, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("weight", "changes", "is_refused"), [
    (WHOLE, {}, True),
    (WHOLE, {"vocab_size": V_ALL}, True),
    (torch.ones(V_ALL, H), {}, False),  # a constant may be that of a shard
    (WHOLE, {"labels": torch.arange(T) + V_ALL}, False),  # of other ranks' rows
    (WHOLE, {"labels": torch.full((T,), -100)}, False),
])  # fmt: skip
def test_a_whole_weight_on_every_rank_is_refused(weight, changes, is_refused):
    same = dict(weight=weight, bias=None, vocab_size=None, vocab_range=None) | changes
    (said,) = set(run_ranks(lambda group: complaint_of_rank(group, group.rank(), same), 3))
    assert ("got the same 20 rows on all 3 ranks, and no label above 11" in said) == is_refused
    assert bool(said) == is_refused


def test_equal_rows_on_purpose_are_said_by_vocab_range():
    def rank(group: dist.ProcessGroup) -> str:
        rows = (group.rank() * V_ALL, (group.rank() + 1) * V_ALL)
        same = dict(weight=WHOLE, bias=None, vocab_size=3 * V_ALL, vocab_range=rows)
        return complaint_of_rank(group, group.rank(), same)

    assert run_ranks(rank, 3) == [""] * 3


def test_weights_that_differ_anywhere_in_a_sample_pass():
    def shards(group: dist.ProcessGroup) -> str:
        start, end = vocab_range(V_ALL, group.rank(), group.size())
        return complaint_of_rank(group, group.rank(), dict(weight=WHOLE[start:end]))

    assert run_ranks(shards, 4) == [""] * 4


def test_uneven_shards_without_vocab_range_are_named():
    def rank(group: dist.ProcessGroup) -> str:
        labels = torch.arange(V_ALL - T, V_ALL)
        even = dict(labels=labels, bias=None, vocab_size=None, vocab_range=None)
        return complaint_of_rank(group, group.rank(), even)

    (said,) = set(run_ranks(rank, 3))
    assert said == (
        f"{BEGINS}rows of weight is 7 on ranks 0, 1 and 6 on rank 2; uneven shards need "
        "vocab_range and vocab_size on all ranks"
    )


def test_logits_of_the_layer_are_compared():
    def rank(group: dist.ProcessGroup) -> list[str]:
        layer = LinearCrossEntropy(H, V_ALL, tp_group=group)
        more, gather = (T + 1, False) if group.rank() else (T, True)
        return [
            complaint(layer.logits, torch.zeros(more, H)),
            complaint(layer.logits, torch.zeros(T, H), gather=gather),
            complaint(layer.logits, torch.zeros(T, H)),
        ]

    (said,) = {tuple(texts) for texts in run_ranks(rank, 2)}
    assert said == (
        f"{BEGINS}hidden.shape is [12, 8] on rank 0 and [13, 8] on rank 1",
        f"{BEGINS}gather is True on rank 0 and False on rank 1",
        "",
    )


def test_logits_that_were_not_compared_are_at_the_next_call(monkeypatch: pytest.MonkeyPatch):
    def rank(group: dist.ProcessGroup) -> list[str]:
        layer = LinearCrossEntropy(H, V_ALL, tp_group=group)
        tokens = T + group.rank()
        said = []
        for compared in ("0", "1"):
            dist.barrier(group)
            monkeypatch.setenv("FLCE_DIST_CHECK_RANKS", compared)
            dist.barrier(group)
            said.append(complaint(layer.logits, torch.zeros(tokens, H), gather=False))
        return said

    (said,) = {tuple(texts) for texts in run_ranks(rank, 2)}
    assert said == ("", f"{BEGINS}hidden.shape is [12, 8] on rank 0 and [13, 8] on rank 1")
