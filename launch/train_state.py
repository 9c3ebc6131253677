"""Everything that the numbers of the next step depend on, as one flat dict for a checkpoint."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flce_dist.launch.train_model import Groups
from flce_dist.launch.train_optimizer import Optimizer, is_sharded


def training_state(
    model: nn.Module, optimizer: Optimizer, groups: Groups, device: torch.device
) -> dict[str, Any]:
    """Return tensors that share memory with model and optimizer, so that loading fills these.

    Parameters that megatron-core splits over the tensor-parallel group are DTensors, split along
    the same dimension. Generator states are copies, one set per rank: see ``restore_random``.
    """
    mesh = DeviceMesh.from_group(groups.tensor, device.type)

    def whole(tensor: Tensor, parameter: Tensor) -> Tensor:
        if not is_sharded(parameter) or not tensor.ndim:
            return tensor
        dim: int = parameter.partition_dim  # type: ignore[attr-defined]
        return DTensor.from_local(tensor.detach(), mesh, [Shard(dim)], run_check=False)

    state: dict[str, Any] = {}
    for name, parameter in optimizer.parameters.items():
        master = optimizer.masters[name]
        state[f"model.{name}"] = whole(parameter.detach(), parameter)
        if master is not parameter:
            state[f"optimizer.{name}.master"] = whole(master, parameter)
        for key, value in optimizer.adamw.state[master].items():
            state[f"optimizer.{name}.{key}"] = whole(value, parameter)
    for key, value in _random_states(device).items():
        state[f"random.rank{dist.get_rank()}.{key}"] = value
    return state


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    """Set this rank's random generators to those of a loaded ``state``."""
    prefix = f"random.rank{dist.get_rank()}."
    torch.set_rng_state(state[prefix + "cpu"])
    if device.type == "cuda":
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.cuda.set_rng_state(state[prefix + "cuda"], device)
        tracker = get_cuda_rng_tracker()
        tracker.set_states(
            {name: state[f"{prefix}megatron.{name}"] for name in tracker.get_states()}
        )


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        states["cuda"] = torch.cuda.get_rng_state(device)
        for name, value in get_cuda_rng_tracker().get_states().items():
            states[f"megatron.{name}"] = value
    return states
