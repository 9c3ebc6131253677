"""DTensors: what a rank holds of one, and the whole of which a rank's rows are a part."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard


def local_part(x: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return what this rank holds of ``x``, and where that lies in ``x``: all of a plain tensor."""
    if not isinstance(x, DTensor):
        return x, tuple(slice(0, n) for n in x.shape)
    (chunk,) = x.__create_chunk_list__()
    ranges = zip(chunk.offsets, chunk.sizes, strict=True)
    return x.to_local(), tuple(slice(start, start + size) for start, size in ranges)


def groups_of(x: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups over which ``x`` is distributed, one for each dimension of its mesh."""
    return x.device_mesh.get_all_groups() if isinstance(x, DTensor) else []


def whole_of_rows(x: Tensor, rows: int, tp_group: dist.ProcessGroup) -> DTensor:
    """Return the tensor of ``rows`` rows of which ``x`` holds this rank's ``vocab_range``.

    If FSDP2 has cut ``x`` again, the dimensions of its mesh come after the group's. Its mesh is
    taken to be as regular as one of ``init_device_mesh``: the same on each rank of the group, but
    for an offset.
    """
    ranks = torch.tensor(dist.get_process_group_ranks(tp_group), device="cpu")
    placements: list[Placement] = [Shard(0)]  # runs of ceil(rows / P), the last short or empty
    local, _ = local_part(x)
    if isinstance(x, DTensor):
        inner = x.device_mesh.mesh - dist.get_rank()
        ranks = ranks.view(-1, *(1 for _ in inner.shape)) + inner
        placements += x.placements
    mesh = DeviceMesh.from_group(
        [tp_group, *groups_of(x)],
        local.device.type,
        mesh=ranks,
        mesh_dim_names=tuple(f"dim {i}" for i in range(ranks.dim())),
    )
    shape = torch.Size((rows, *x.shape[1:]))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=x.stride()
    )


def in_kind(local: Tensor, like: Tensor) -> Tensor:
    """Return ``local`` as this rank's part of a tensor distributed as ``like`` is."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
