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


def test_tokens_of_all_chunks_are_gathered_and_summed_at_once():
    options: dict[str, Any] = {"schedule": "in_forward", "sequence_parallel": True, **FEW_BYTES}
    with small_chunks():
        first, *some, last = on_threads(4, IN_CHUNKS, **options).calls
    assert (first, last) == ("allgather float32[384]", "reduce_scatter SUM float32[1536]")
    sums = {f"allreduce {each} float32" for each in ("SUM", "MAX")}
    assert len(some) > 3 and {call.split("[")[0] for call in some} == sums


def test_what_is_all_here_is_not_copied():
    """Also if one rank's hidden is column-major."""
    hidden = torch.randn(8, 6).T
    assert TokenGather(hidden).wait() is hidden
