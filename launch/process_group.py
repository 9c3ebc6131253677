"""The process group of a measurement: torchrun's ranks, or none."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def start(device_type: str) -> tuple[torch.device, dist.ProcessGroup | None]:
    """Join torchrun's ranks or an existing default group; alone, there is no group."""
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        # Long enough for a rank that compiles kernels, short enough for one that is gone.
        timeout = timedelta(minutes=5)
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timeout)
    return device, dist.group.WORLD if dist.is_initialized() else None
