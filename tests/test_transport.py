"""How tokens travel: which groups copy between GPUs, labels at a first call, and what is sent."""

import os
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist

from flce_dist import linear_cross_entropy
from flce_dist.parallel import transport
from flce_dist.parallel.collectives import TokenGather
from flce_dist.testing import run_ranks
from tests.parallel_problem import FEW_BYTES, IN_CHUNKS, complaint, on_threads, small_chunks


def reach_rank(group: dist.ProcessGroup, environments: list[dict[str, str]]) -> bool:
    rank, gpu = group.rank(), torch.device("cuda", 0)
    with (
        mock.patch.dict(os.environ, environments[rank]),
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(transport, "_gpu_name", return_value=f"GPU {rank}"),
    ):
        return transport._all_reach_all(group, gpu)


@pytest.mark.parametrize(
    ("of_rank_0", "copies"),
    [({"NCCL_P2P_DISABLE": "0"}, True), ({"FLCE_DIST_PEER_COPIES": "0"}, False),
     ({"NCCL_P2P_DISABLE": "1"}, False)],
)  # fmt: skip
def test_one_rank_turns_copies_off_for_its_group(ranks, of_rank_0, copies):
    assert ranks.run(reach_rank, [of_rank_0, {}]) == [copies, copies]


# --- labels at a group's first call

CHECKED = mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_LABELS": "1"})
T, V = 8, 12


def loss_of(group: dist.ProcessGroup, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    n = len(labels) // (2 if options.get("sequence_parallel") else 1)
    hidden, weight = torch.ones(n, 4), torch.ones(V, 4)
    return linear_cross_entropy(hidden, weight, labels, tp_group=group, **options)


LABELS = list(range(2, 2 + T))
OTHER_LABELS = {
    "one more": [2, 3, 4, 6, 6, 7, 8, 9],
    "two swapped": [2, 3, 5, 4, 6, 7, 8, 9],
    "the same sums": [3, 1, 5, 5, 6, 7, 8, 9],  # of labels, and of labels times places
    "ignored": [2, 3, 4, 5, 6, 7, 8, -100],
}


@pytest.mark.parametrize("other", OTHER_LABELS.values(), ids=OTHER_LABELS)
def test_other_labels_on_some_ranks_raise_on_all(other):
    def rank(group: dist.ProcessGroup) -> str:
        return complaint(loss_of, group, torch.tensor(other if group.rank() in (1, 3) else LABELS))

    with CHECKED:
        (said,) = set(run_ranks(rank, 4))
    assert "labels must" in said and "ranks 1, 3 got others than rank 0" in said


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
def test_labels_of_other_lengths(options):
    """Else ranks would wait for each other, or mix what belongs to different tokens."""

    def rank(group: dist.ProcessGroup) -> str:
        labels = torch.zeros(T - 2 * group.rank(), dtype=torch.int32)
        return complaint(loss_of, group, labels, **options)

    with CHECKED:
        assert all("rank 1 got others" in text for text in run_ranks(rank, 2))


def test_only_the_first_call_of_a_group_is_checked():
    def rank(group: dist.ProcessGroup) -> list[int]:
        gathers, other = [], dist.new_group([0, 1])
        one: Any
        for one in (group, group, other):
            before = len(one.calls)
            loss_of(one, torch.arange(T))
            gathers.append(one.calls[before:].count("allgather int64[2]"))
        return gathers

    with CHECKED:
        assert run_ranks(rank, 2) == [[1, 0, 1]] * 2
    with mock.patch.dict(os.environ, {"FLCE_DIST_CHECK_LABELS": "0"}):
        assert run_ranks(rank, 2) == [[0, 0, 0]] * 2
        assert run_ranks(lambda g: complaint(loss_of, g, torch.arange(T) + g.rank()), 2) == ["", ""]


def compiled_rank(group: dist.ProcessGroup) -> str:
    with CHECKED, mock.patch.object(transport, "_have_called", WeakSet()):
        call = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
        assert torch.isfinite(call(group, torch.arange(T)))
        transport._have_called.clear()
        return complaint(call, group, torch.arange(T) + group.rank())


def test_labels_under_compile(ranks):
    assert all("rank 1 got others" in text for text in ranks.run(compiled_rank))


def test_no_check_while_a_graph_is_captured(monkeypatch):
    called = WeakSet[Any]()
    monkeypatch.setattr(transport, "_have_called", called)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    group, labels = mock.Mock(), mock.Mock(is_cuda=True)
    transport.check_same_labels(labels, group)
    assert group not in called


# --- what is gathered and summed


def calls_of(**options: Any) -> Any:
    with small_chunks():
        return on_threads(4, IN_CHUNKS, sequence_parallel=True, **options).calls


def test_all_tokens_are_gathered_and_summed_at_once_in_chunks_too():
    sums = [f"allreduce {each} float32[{{}}]" for each in ("SUM", "MAX", "SUM")]
    of_all, gather = [each.format(48) for each in sums], "allgather float32[384]"
    scatter = "reduce_scatter SUM float32[1536]"
    assert [*calls_of(schedule="cached")] == [gather, *of_all, gather, scatter]
    assert [*calls_of(schedule="in_forward")] == [gather, *of_all, scatter]
    first, *some, last = calls_of(schedule="in_forward", **FEW_BYTES)
    assert (first, last) == (gather, scatter) and len(some) > 3
    assert {call.split("[")[0] for call in some} == {each.split("[")[0] for each in sums}


def test_what_is_all_here_is_not_copied():
    """Also if one rank's hidden is column-major."""
    hidden = torch.randn(8, 6).T
    assert TokenGather(hidden).wait() is hidden
