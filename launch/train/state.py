"""Everything that the numbers of the next step depend on, as flat dicts for a checkpoint."""

import torch
from torch import Tensor

from flce_dist.launch.program import RunError
from flce_dist.launch.train.optimizer import Optimizer


def model_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return this rank's parameters, no copies; those with copies of the weights hold the same."""
    return {f"model.{name}": x.detach() for name, x in optimizer.parameters.items()}


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state of this rank's shards, no copies; no other rank holds it."""
    state: dict[str, Tensor] = {}
    for name, shard in optimizer.shards.items():
        if optimizer.parameters[name].dtype != shard.dtype:
            state[f"optimizer.{name}.fp32"] = shard.detach()
        for key, value in optimizer.adamw.state[shard].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def restore(state: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Copy what one of the functions above returned in an earlier process into what it returns now.

    Raises:
        RunError: if names or shapes differ.
    """
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    others = {name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()}
    if shapes != others:
        names = sorted(name for name, _ in shapes.items() ^ others.items())
        raise RunError(
            f"the checkpoint was made for another model, which differs in {', '.join(names[:5])}; "
            "use the package versions that it was made with"
        )
    for name, tensor in state.items():
        tensor.copy_(saved[name])


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this rank's random generators."""
    state = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        state["random.cuda"] = torch.cuda.get_rng_state(device)
        for name, value in get_cuda_rng_tracker().get_states().items():
            state[f"random.megatron.{name}"] = value
    return state


def restore_random(saved: dict[str, Tensor], device: torch.device) -> None:
    """Set this rank's random generators; a checkpoint made on CPUs has none for a GPU."""
    torch.set_rng_state(saved["random.cpu"])
    if device.type == "cuda" and "random.cuda" in saved:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        torch.cuda.set_rng_state(saved["random.cuda"], device)
        tracker = get_cuda_rng_tracker()
        names = tracker.get_states()
        tracker.set_states({name: saved[f"random.megatron.{name}"] for name in names})
