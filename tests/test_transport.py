"""How tokens travel: which groups copy between GPUs, labels at a first call, and what is sent."""

import os
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flce_dist.parallel import transport
from flce_dist.parallel.collectives import TokenGather
from flce_dist.parallel.peers import driver
from flce_dist.parallel.peers.driver import PeerDriver
from flce_dist.testing import run_ranks
from tests.parallel_problem import FEW_BYTES, IN_CHUNKS, on_threads, small_chunks


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


def test_tokens_of_chosen_chunks_are_gathered_and_summed_at_once():
    """They may lie anywhere; tests/test_sections.py has the chunks of all tokens."""
    problem = IN_CHUNKS.changed(ignored=0.0)
    options: dict[str, Any] = {"schedule": "in_forward", "sequence_parallel": True, **FEW_BYTES}
    with small_chunks():
        first, *some, last = on_threads(4, problem, max_counted=problem.T, **options).calls
    assert (first, last) == ("allgather float32[384]", "reduce_scatter SUM float32[1536]")
    sums = {f"allreduce {each} float32" for each in ("SUM", "MAX")}
    assert len(some) > 3 and {call.split("[")[0] for call in some} == sums


def test_what_is_all_here_is_not_copied():
    """Also if one rank's hidden is column-major."""
    hidden = torch.randn(8, 6).T
    assert TokenGather(hidden).wait() is hidden


class Meeting:
    """Shared memory as far as its set-up goes: ranks meet, and one may fail after that."""

    def __init__(self, driver: PeerDriver, holds: str, fails: bool) -> None:
        self.told = driver.meet("sets up", holds)
        if fails:
            raise MemoryError


def test_a_rank_that_fails_between_two_memories_meets_the_others_when_all_set_up_again(monkeypatch):
    """Rank 0 waits for it until the limit of a set-up, and the next one begins anew on both."""
    monkeypatch.setattr(transport, "_memories", {})
    monkeypatch.setattr(transport, "_all_reach_all", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    of_thread = threading.local()
    monkeypatch.setattr(driver, "timeout_of", lambda *_: timedelta(seconds=of_thread.limit))
    monkeypatch.setattr(
        transport,
        "PeerMemory",
        lambda driver, holds: Meeting(driver, holds, of_thread.fails == holds),
    )

    def rank(group: dist.ProcessGroup) -> Any:
        of_thread.limit, of_thread.fails = 1.0, "hidden states" if group.rank() else ""
        error = MemoryError if group.rank() else RuntimeError
        with pytest.raises(error, match=None if group.rank() else r"ranks \[1\] did not join"):
            transport.memories_of(group, torch.device("cuda", 0))
        of_thread.limit, of_thread.fails = 20.0, ""
        return transport.memories_of(group, torch.device("cuda", 0))

    expected = [[("sets up", holds)] * 2 for holds in ("hidden states", "shares of dhidden")]
    for both in run_ranks(rank, 2):
        assert [memory.told for memory in both] == expected
