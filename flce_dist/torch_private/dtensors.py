"""DTensors: what is in flight, where a part lies, and how FSDP2 has sharded a parameter."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from flce_dist.torch_private.lookup import needed


def async_tensors() -> tuple[type[Tensor], ...]:
    """Return the types of tensors whose collective may be in flight. Without one: none."""
    try:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
    except ImportError:
        return ()
    return (AsyncCollectiveTensor,)


def fsdp_sharding(x: Tensor) -> tuple[Any, float] | None:
    """Return the mesh over which FSDP2 has sharded a parameter, and what sums are divided by.

    None for another tensor, and under torch.compile. Without the names below: None for each.
    """
    if torch.compiler.is_compiling():
        return None
    with suppress(ImportError, AttributeError):
        from torch.distributed._composable_state import _module_state_mapping as states

        for state in list(states.values()):
            groups = getattr(state(), "_fsdp_param_groups", None)  # one in older releases
            for group in filter(None, groups or [getattr(state(), "_fsdp_param_group", None)]):
                for parameter in group.fsdp_params:
                    if parameter.sharded_param is x:
                        mesh = parameter.mesh_info.mesh  # of data ranks, maybe replicas first
                        return mesh, group.gradient_divide_factor or mesh.size()
    return None


def place_of(x: Any) -> tuple[slice, ...]:
    """Return which slices of a DTensor its local tensor is. Without it: an error."""
    (chunk,) = needed(x, "__create_chunk_list__", "a state dict of DTensors")()
    ranges = zip(chunk.offsets, chunk.sizes, strict=True)
    return tuple(slice(start, start + size) for start, size in ranges)
