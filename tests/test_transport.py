"""Which groups copy between GPUs; the copies themselves are in test_peer_copies.py."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flce_dist.parallel import transport


def reach_rank(group: dist.ProcessGroup, environments: list[dict[str, str]]) -> bool:
    """Whether the ranks copy, as if each had a GPU of one host and this environment."""
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
    [
        ({}, True),
        ({"FLCE_DIST_PEER_COPIES": "1", "NCCL_P2P_DISABLE": "0"}, True),
        ({"FLCE_DIST_PEER_COPIES": "0"}, False),
        ({"NCCL_P2P_DISABLE": "1"}, False),
    ],
)
def test_one_rank_turns_copies_off_for_its_group(ranks, of_rank_0, copies):
    assert ranks.run(reach_rank, [of_rank_0, {}]) == [copies, copies]
