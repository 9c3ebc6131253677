"""Which calls of a group are compared, and that all ranks raise what one refuses.

test_rank_check.py has what is compared.
"""

import functools
import os
import re
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics, linear_logprob
from flce_dist.arguments import rank_check
from flce_dist.testing import run_ranks
from tests.parallel_problem import complaint
from tests.rank_calls import BEGINS, F64, ROWS, H, T, call, complaint_of_rank, leaf

pytestmark = pytest.mark.usefixtures("ranks_compared")


def test_only_the_first_call_of_a_group_is_checked_and_sends_about_1_kib():
    def rank(group: Any) -> list[list[str]]:
        other: Any = dist.new_group([0, 1])
        gathers = []
        for one in (group, group, other):
            before = len(one.calls)
            linear_cross_entropy(**call(group.rank(), 2), tp_group=one)
            gathers.append([x for x in one.calls[before:] if x.startswith("allgather")])
        return gathers

    first, second = run_ranks(rank, 2)
    assert first == second and first[0] == first[2] and not first[1]
    length, summary = first[0]
    assert length == "allgather int64[1]"
    (size,) = re.findall(r"allgather uint8\[(\d+)\]", summary)
    assert 512 < int(size) < 2048
    with mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_RANKS": "0"}):
        assert run_ranks(rank, 2) == [[[], [], []]] * 2


def test_no_check_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    group: Any = mock.Mock()
    call: Any = mock.Mock(tp_group=group)
    operands: Any = mock.Mock(hidden=torch.empty(0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    rank_check.check_alike("linear_cross_entropy", call, operands)
    assert group not in rank_check._compared


def test_what_was_refused_is_compared_again():
    def rank(group: dist.ProcessGroup) -> list[str]:
        labels = torch.arange(T) + group.rank()
        said = [complaint_of_rank(group, group.rank(), dict(labels=labels)) for _ in range(2)]
        return [*said, *(complaint_of_rank(group, group.rank(), {}) for _ in range(2))]

    for first, second, *after in run_ranks(rank, 2):
        assert first == second and first.startswith(f"{BEGINS}hash of labels is ")
        assert after == ["", ""]


def test_each_function_is_compared():
    """Also two functions at the same time."""

    def rank(group: dist.ProcessGroup) -> list[str]:
        ids, mine = torch.arange(T)[:, None] + group.rank(), call(group.rank(), 2)
        rows = {name: mine[name] for name in ("vocab_size", "vocab_range")}
        scored = functools.partial(
            linear_logprob, mine["hidden"], mine["weight"], ids, tp_group=group, **rows
        )
        said = [complaint_of_rank(group, 0, {}), complaint(scored)]
        counted = functools.partial(linear_cross_entropy_with_metrics, **mine, tp_group=group)
        return [*said, complaint(scored if group.rank() else counted)]

    (said,) = {tuple(texts) for texts in run_ranks(rank, 2)}
    assert said[0] == "" and said[1].startswith(f"{BEGINS}hash of ids is ")
    assert said[2] == (
        f"{BEGINS}function is 'linear_cross_entropy_with_metrics' on rank 0 and "
        "'linear_logprob' on rank 1"
    )


def compiled_rank(group: dist.ProcessGroup) -> str:
    def loss(labels: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(torch.ones(T, 4), torch.ones(T, 4), labels, tp_group=group)

    checks = mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_RANKS": "1"})
    with checks, mock.patch.object(rank_check, "_compared", WeakKeyDictionary()):
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        assert torch.isfinite(compiled(torch.arange(T)))
        rank_check._compared.clear()
        return complaint(compiled, torch.arange(T) + group.rank())


def test_under_compile(pools):
    for said in pools[2].run(compiled_rank):
        assert said.startswith(f"{BEGINS}hash of labels is ")


def compiled_functions_rank(group: dist.ProcessGroup) -> str:
    def compiled(call: Any) -> Any:
        def loss(labels: torch.Tensor) -> Any:
            return call(torch.ones(T, 4), torch.ones(T, 4), labels, tp_group=group)

        return torch.compile(loss, backend="aot_eager", fullgraph=True)

    checks = mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_RANKS": "1"})
    with checks, mock.patch.object(rank_check, "_compared", WeakKeyDictionary()):
        compiled(linear_cross_entropy)(torch.arange(T))
        of_metrics = compiled(linear_cross_entropy_with_metrics)
        return complaint(of_metrics, torch.arange(T) + group.rank())


def test_each_compiled_function_has_a_first_call(pools):
    for said in pools[2].run(compiled_functions_rank):
        assert said.startswith(f"{BEGINS}hash of labels is ")


REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    (
        "weight must have hidden's dtype",
        linear_cross_entropy,
        dict(weight=leaf(ROWS, H, dtype=F64)),
    ),
    ("labels must be", linear_cross_entropy, dict(labels=torch.arange(T - 1))),
    ("token_weight must be", linear_cross_entropy, dict(token_weight=torch.ones(T - 1))),
    ("hidden must be a torch.Tensor", linear_cross_entropy, dict(hidden=[1.0])),
    ("bias must be", linear_cross_entropy_with_metrics, dict(bias=torch.zeros(1))),
    ("ids must be", linear_logprob, dict(ids=torch.arange(T))),
]


@pytest.mark.parametrize(("text", "function", "changes"), REFUSED, ids=lambda x: str(x)[:20])
def test_what_one_rank_refuses_raises_on_all(text, function, changes):
    def rank(group: dist.ProcessGroup) -> str:
        mine = call(group.rank(), 3)
        if function is linear_logprob:
            mine |= dict(ids=mine.pop("labels")[:, None])
            del mine["token_weight"]
        return complaint(function, **mine | (changes if group.rank() == 1 else {}), tp_group=group)

    first, own, last = run_ranks(rank, 3)
    assert re.match(text, own)
    assert first == last == f"{BEGINS}rank 1 raised ValueError: {own}"


def test_over_gloo_no_rank_aborts_or_waits():
    def rank(group: dist.ProcessGroup) -> list[str]:
        odd = group.rank() == 1
        refused = dict(hidden=torch.zeros(T, H + 1)) if odd else {}
        differing = dict(token_weight=None) if odd else {}
        return [complaint_of_rank(group, group.rank(), x) for x in (refused, differing, {})]

    for refused, differing, alike in run_ranks(rank, 2, backend="gloo"):
        assert "weight must be [V, H] with H = 9" in refused
        assert differing == f"{BEGINS}token_weight given is True on rank 0 and False on rank 1"
        assert alike == ""
