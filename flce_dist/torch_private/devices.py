"""GPUs: assertions, streams, and memory that they share."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def assert_soon(condition: Tensor, message: str) -> None:
    """Assert a bool tensor without waiting for its device. Without it: the host waits."""
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(condition, message)
    elif not condition:
        raise RuntimeError(message)


def current_stream(device: torch.device) -> int:
    """Return CUDA's handle of a device's current stream. Without it: by way of torch's object."""
    of_index = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return of_index(device.index) if of_index else torch.cuda.current_stream(device).cuda_stream


def shares_memory() -> bool:
    """Whether this torch has what ``shared_memory`` and ``store_of`` need.

    Without it: no copies between GPUs, tokens travel by collectives.
    """
    try:
        from torch.distributed import _symmetric_memory as memory
    except ImportError:
        return False
    has_memory = all(hasattr(memory, name) for name in ("empty", "rendezvous"))
    return has_memory and hasattr(dist.distributed_c10d, "_get_process_group_store")


def shared_memory(nbytes: int, device: torch.device, group: Any) -> tuple[Tensor, Any]:
    """Allocate bytes on each rank of the group of this name; return them and how to reach all."""
    from torch.distributed import _symmetric_memory as memory

    mine = memory.empty(nbytes, dtype=torch.uint8, device=device)
    return mine, memory.rendezvous(mine, group)
