"""Meshes of DTensors: which of their dimensions a group is, and DTensors of local tensors."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def dimension_of(mesh: DeviceMesh, tp_group: dist.ProcessGroup | None) -> int | None:
    """Return the dimension of ``mesh`` whose ranks are those of ``tp_group``, in the same order."""
    coordinate = mesh.get_coordinate()
    if tp_group is None or coordinate is None:
        return None
    for d in range(mesh.ndim):
        same_ranks = ranks_of(mesh.get_group(d)) == ranks_of(tp_group)
        if same_ranks and coordinate[d] == dist.get_rank(tp_group):
            return d
    return None


def ranks_of(tp_group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(tp_group)


def from_local(
    local: Tensor, mesh: DeviceMesh, placements: Any, shape: Iterable[int], stride: Any
) -> DTensor:
    size = torch.Size(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)
