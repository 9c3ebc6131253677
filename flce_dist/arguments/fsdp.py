"""Parameters that FSDP2 has sharded, gathered from the data ranks that average their gradient."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flce_dist.arguments.meshes import dimension_of, from_local
from flce_dist.parallel import collectives
from flce_dist.parallel.vocab import vocab_range
from flce_dist.torch_private.dtensors import fsdp_sharding


def gathered(x: Any, hidden: Any, tp_group: dist.ProcessGroup | None) -> Any:
    """Return ``x``; if FSDP2 has sharded it, this rank's rows over ``tp_group`` in hidden's dtype.

    One all-gather. Backward sums in the dtype of ``x``, then divides as FSDP2 does.
    """
    if not (isinstance(x, DTensor) and isinstance(hidden, Tensor) and x.device == hidden.device):
        return x
    mesh = x.device_mesh
    dim = dimension_of(mesh, tp_group)
    rank = 0 if dim is None else collectives.group_rank(tp_group)
    P = 1 if dim is None else mesh.size(dim)
    sharding = fsdp_sharding(x) if dim is None or mesh.ndim > 1 else None
    if sharding is None:
        return x
    data_mesh, divisor = sharding
    if data_mesh.size() * P != mesh.size():  # other ranks than tp_group's share its rows, too
        return x
    start, end = vocab_range(x.shape[0], rank, P)
    device_type = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    local = x.to_local()
    if local.requires_grad:
        local.register_hook(lambda dx: dx / divisor)
    # Without the last dimension, tensor parallelism: torch 2.9 redistributes _StridedShard wrongly.
    over_data: Any = x.placements[: data_mesh.ndim]
    of_data = [p if p.is_replicate() else Shard(p.dim) for p in over_data]
    part = from_local(local, data_mesh, of_data, (end - start, *x.shape[1:]), x.stride())
    whole = part.redistribute(placements=[Replicate()] * data_mesh.ndim, forward_dtype=dtype)
    return whole.to_local(grad_placements=[Partial()] * data_mesh.ndim)
