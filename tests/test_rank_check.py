"""Ranks that would call differently are told so, all of them, and none waits for another.

Also about values that they must share, and rows of the weight that they must not.
T = 12 tokens, H = 8, V_all = 20 rows of vocabulary, P ranks.
"""

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flce_dist import check_ranks, rank_check
from flce_dist.options import LossOptions
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import run_ranks
from tests.parallel_problem import complaint
from tests.test_options import CHANGED

T, H, V_ALL = 12, 8, 20
BEGINS = "ranks must call alike: "


def call(rank: int, P: int) -> dict[str, Any]:
    start, end = vocab_range(V_ALL, rank, P)
    return dict(
        hidden=torch.zeros(T, H, requires_grad=True),
        weight=torch.zeros(end - start, H, requires_grad=True),
        labels=torch.arange(T),
        bias=torch.zeros(end - start),
        token_weight=torch.ones(T),
        temperature=0.7,
        vocab_size=V_ALL,
        vocab_range=(start, end),
    )


def verdicts(group: dist.ProcessGroup, odd: int, changes: dict[str, Any]) -> str:
    mine = call(group.rank(), group.size()) | (changes if group.rank() == odd else {})
    return complaint(check_ranks, **mine, tp_group=group)


def say(changes: dict[str, Any]) -> str:
    """The error of each of three ranks, which must be the same; rank 1 calls with ``changes``."""
    (said,) = set(run_ranks(lambda group: verdicts(group, 1, changes), 3))
    return said


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


F64 = torch.float64
ROWS = 7  # of rank 1 of 3

# Of these every rank names the value; others have consequences that come first.
ALONE = {"vocab_size", "vocab_range", "sequence_parallel", "sequence_dim", "tp_invariant", "impl"}
OPTIONS = {k: x for k, x in CHANGED.items() if k not in {*ALONE, "accumulate_dweight"}}

# What is named, with the others' value and that of rank 1 of 3; what that rank gives.
DISAGREEMENTS: list[tuple[dict[str, tuple[Any, Any]], dict[str, Any]]] = [
    (
        {"hidden.shape": ([12, 8], [10, 8]), "labels.shape": ([12], [10])},
        dict(hidden=leaf(T - 2, H), labels=torch.arange(T - 2), token_weight=torch.ones(T - 2)),
    ),
    (
        {"hidden.dtype": ("torch.float32", "torch.float64"), "bias": ("torch.float32", None)},
        dict(hidden=leaf(T, H, dtype=F64), weight=leaf(ROWS, H, dtype=F64), bias=None),
    ),
    ({"token_weight": ("torch.float32", None)}, dict(token_weight=None)),
    ({"temperature": ("torch.float64", "torch.float32")}, dict(temperature=torch.full((T,), 0.7))),
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
    assert say(changes) == BEGINS + "; ".join(
        f"{name} is {usual!r} on ranks 0, 2 and {odd!r} on rank 1"
        for name, (usual, odd) in named.items()
    )


def test_rows_that_do_not_meet_are_named():
    said = say(dict(vocab_range=(7, 15), weight=leaf(8, H), bias=torch.zeros(8)))
    expected = "of rank 2 must begin at 15, where those of rank 1 end, got (14, 20)"
    assert said == f"{BEGINS}vocabulary rows {expected}"


def test_one_rank_without_gradients_is_named():
    def rank(group: dist.ProcessGroup) -> str:
        with torch.set_grad_enabled(group.rank() != 1):
            return verdicts(group, 0, {})

    (said,) = set(run_ranks(rank, 2))  # threads have a grad mode of their own
    assert said.startswith(f"{BEGINS}torch.is_grad_enabled() is True on rank 0 and False on rank 1")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (dict(label_smoothing=1.5), r"ValueError: label_smoothing must be .* \[0, 1\], got 1.5"),
        (dict(labels=torch.full((T,), V_ALL)), r"ValueError: labels must be within .*, got 20 at"),
        (dict(labels=None), "ValueError: labels must be a torch.Tensor, got NoneType"),
        (dict(schedule="in_forward", reduction="none"), "NotImplementedError: schedule='in_f"),
        (dict(tp_invariant=True), "NotImplementedError: tp_invariant=True needs impl='triton'"),
    ],
)
def test_nobody_waits_for_a_rank_that_cannot_call(changes, complaint):
    said = say(changes)
    expected = f"ranks must call with valid arguments, got on rank 1: {complaint}"
    assert re.match(expected, said), said


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
        check_ranks(**call(group.rank(), P) | AGREEMENTS[case], tp_group=group)

    run_ranks(rank, P)


def test_padding_anywhere_and_equal_numbers_of_other_types_agree():
    def rank(group: dist.ProcessGroup) -> str:
        start, end = rows = [(0, 10), (10, 24), (20, 26)][group.rank()]
        changes = dict(weight=leaf(end - start, H), bias=None, vocab_range=rows)
        return verdicts(group, group.rank(), changes)

    assert run_ranks(rank, 3) == [""] * 3
    assert say(dict(label_smoothing=0, logit_scale=1, labels=torch.arange(T).int())) == ""


def test_about_1_kib_of_each_rank_is_gathered():
    def rank(group: Any) -> list[str]:
        check_ranks(**call(group.rank(), 2), tp_group=group)
        return group.calls

    first, second = run_ranks(rank, 2)
    assert first == second and first[0] == "allgather int64[1]"
    (size,) = re.findall(r"allgather uint8\[(\d+)\]", " ".join(first))
    assert 512 < int(size) < 2048


def test_it_sends_from_the_device_of_hidden(monkeypatch):
    def gather(summaries: list[Any], mine: Any, group: dist.ProcessGroup) -> None:
        assert device_of.mock_calls == [mock.call(given["hidden"]), mock.call().__enter__()]
        summaries[:] = [mine]

    given, device_of = call(0, 1), mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    run_ranks(lambda group: check_ranks(**given, tp_group=group), 1)
    assert device_of().__exit__.called


def test_alone_only_its_own_arguments_are_checked():
    mine: Any = call(0, 1)
    check_ranks(**mine)
    with pytest.raises(NotImplementedError, match="schedule='in_forward' needs a scalar"):
        check_ranks(**mine, schedule="in_forward", reduction="none")
    assert "tp_group must be None or a " in complaint(check_ranks, **mine, tp_group="world")


def test_all_facts_are_known_here():
    mine = call(0, 1)
    named = {name: mine[name] for name in rank_check.Arguments._fields[:6]}
    arguments = rank_check.Arguments(**named, options=LossOptions(), tp_group=None)
    known = {name for named, _ in DISAGREEMENTS for name in named}
    known |= {"torch.is_grad_enabled()", "sequence_dim"}  # tests/test_sequence_dim.py has this one
    known |= {"with_metrics", "tp_invariant", "accumulate_dweight"}
    assert {*rank_check._summary(arguments)["arguments"]} == known


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("labels", torch.arange(T).flip(0)),
        ("token_weight", torch.linspace(0, 1, T)),
        ("temperature", 0.6),
    ],
)
def test_values_that_all_must_share_are_compared(name, other):
    assert say({name: other}).startswith(f"{BEGINS}hash of {name} is '")


WHOLE = torch.randn(V_ALL, H, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("weight", "changes", "expected"),
    [
        (WHOLE, {}, "got the same 20 rows on all 3 ranks, and no label above 11: "),
        (WHOLE, {"vocab_size": V_ALL}, "got the same 20 rows on all 3 ranks"),
        (torch.ones(V_ALL, H), {}, ""),  # a constant may be that of a shard
        (WHOLE, {"labels": torch.arange(T) + V_ALL}, ""),  # of other ranks' rows
        (WHOLE, {"labels": torch.full((T,), -100)}, ""),
    ],
)
def test_a_whole_weight_on_every_rank_is_noticed(weight, changes, expected):
    same = dict(weight=weight, bias=None, vocab_size=None, vocab_range=None) | changes
    (said,) = set(run_ranks(lambda group: verdicts(group, group.rank(), same), 3))
    wanted = expected and f"weight must be each rank's own rows of the vocabulary, {expected}"
    assert said.startswith(wanted) and bool(said) == bool(wanted)


def test_weights_that_differ_anywhere_in_a_sample_pass():
    def shards(group: dist.ProcessGroup) -> str:
        start, end = vocab_range(V_ALL, group.rank(), group.size())
        return verdicts(group, group.rank(), dict(weight=WHOLE[start:end]))

    assert run_ranks(shards, 4) == [""] * 4
