"""DTensors in state dicts: the whole of what each rank holds a part of, and back."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from flce_dist.arguments.meshes import from_local, ranks_of
from flce_dist.torch_private.dtensors import place_of


def local_part(x: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return the local tensor of ``x`` and its slices of ``x``; all of a plain tensor."""
    if not isinstance(x, DTensor):
        return x, tuple(slice(0, n) for n in x.shape)
    return x.to_local(), place_of(x)


def groups_of(x: Tensor) -> list[dist.ProcessGroup]:
    """Return the group of each dimension of the mesh of ``x``; none for a plain tensor."""
    return x.device_mesh.get_all_groups() if isinstance(x, DTensor) else []


def whole_of_rows(x: Tensor, rows: int, tp_group: dist.ProcessGroup) -> DTensor:
    """Return the DTensor of ``rows`` rows whose ``vocab_range`` on this rank is ``x``.

    If FSDP2 has sharded ``x`` again, the dimensions of its mesh follow the group's. The meshes of
    the group's ranks must differ only by an offset, as those of ``init_device_mesh`` do.
    """
    ranks = torch.tensor(ranks_of(tp_group), device="cpu")
    placements: list[Placement] = [Shard(0)]  # ceil(rows / P) rows each; the last shorter or empty
    local, _ = local_part(x)
    if isinstance(x, DTensor):
        inner = x.device_mesh.mesh - dist.get_rank()
        ranks = ranks.view(-1, *(1 for _ in inner.shape)) + inner
        placements += x.placements
    kind = local.device.type
    names = tuple(f"dim {i}" for i in range(ranks.dim()))
    groups = [tp_group, *groups_of(x)]
    mesh = DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)
    return from_local(local, mesh, placements, (rows, *x.shape[1:]), x.stride())


def in_kind(local: Tensor, like: Tensor) -> Tensor:
    """Return ``local``; if ``like`` is a DTensor, as one with its mesh and placements."""
    if not isinstance(like, DTensor):
        return local
    return from_local(local, like.device_mesh, like.placements, like.shape, like.stride())
