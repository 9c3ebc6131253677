"""The device of a rank, and the process group in which it meets the others."""

import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from flce_dist.launch.train.config import RunConfig
from flce_dist.launch.yaml_config import ConfigError


def choose_device(config: RunConfig) -> torch.device:
    """Return the device of this rank, or of a process without torchrun.

    Raises:
        ConfigError: if the machine has no GPU for it, or ``head.impl`` cannot run on it.
    """
    gpus = torch.cuda.device_count()
    kind = ("cuda" if gpus else "cpu") if config.device == "auto" else config.device
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if kind == "cuda" and local_ranks > gpus:
        raise ConfigError(
            f"device=cuda needs a GPU for each of the {local_ranks} ranks here, found {gpus}"
        )
    if kind == "cpu" and config.head.impl == "triton":
        raise ConfigError("head.impl=triton needs GPUs; on CPU use eager or leave it out")
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


def join_ranks(device: torch.device, **found_by: Any) -> None:
    """Make the default process group; ``found_by`` says how ranks meet if not by torchrun."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Objects (what ranks decide together) go over gloo, tensors over NCCL.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **found_by)
    else:
        dist.init_process_group("gloo", **found_by)
    # megatron-core warns of each optional package that is not there, names what it will deprecate,
    # and calls collectives by names that newer PyTorch deprecates.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
