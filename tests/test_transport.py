"""How tokens travel: which groups copy between GPUs, labels at a first call, and what is sent."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flce_dist.parallel import transport
from flce_dist.parallel.collectives import TokenGather
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
