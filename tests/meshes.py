"""DTensors on the simulated ranks' mesh, for every test that passes some."""

import functools
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from flce_dist.parallel.vocab import vocab_range
from tests.parallel_problem import Problem

SPLIT = Shard(0)
WHOLE = Replicate()
ROWS = {"weight": SPLIT, "bias": SPLIT}


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    """The mesh of the workers; its last dimension is the tensor-parallel one."""
    names = ("other", "tp")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def distributed(x: Tensor, mesh: DeviceMesh, placement: Any) -> Tensor:
    """``x`` with this placement over the last dimension, replicated over others; None: plain."""
    if placement is None:
        return x.clone()
    if placement == Partial():
        return DTensor.from_local(x, mesh, [placement])
    return distribute_tensor(x, mesh, [*[WHOLE] * (mesh.ndim - 1), placement])


def operands(mesh: DeviceMesh, problem: Problem, **placements: Any) -> dict[str, Any]:
    """hidden, weight, bias and labels; those without a placement are plain tensors."""
    found: dict[str, Any] = {}
    for name, x in zip(("hidden", "weight", "bias", "labels"), problem.tensors, strict=True):
        placement = placements.get(name)
        rank = mesh.get_local_rank(mesh.ndim - 1)
        if placement is None and name in ("weight", "bias") and placements.get("rows", True):
            x = x[slice(*vocab_range(len(x), rank, mesh.size(mesh.ndim - 1)))]
        found[name] = distributed(x, mesh, placement)
        if name != "labels":
            found[name].requires_grad_()
    return found
