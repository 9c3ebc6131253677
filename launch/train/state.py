"""Everything that the numbers of the next step depend on, as flat dicts for a checkpoint."""

import torch
from torch import Tensor

from flce_dist.launch.program import RunError
from flce_dist.launch.train.optimizer import Optimizer


def model_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return this rank's parameters and optimizer state: the tensors themselves, no copies.

    Data-parallel replicas hold the same.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in optimizer.parameters.items():
        master = optimizer.masters[name]
        state[f"model.{name}"] = parameter.detach()
        if master is not parameter:
            state[f"optimizer.{name}.master"] = master
        for key, value in optimizer.adamw.state[master].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def restore_model(optimizer: Optimizer, saved: dict[str, Tensor]) -> None:
    """Copy what ``model_state`` returned in an earlier process into model and optimizer.

    Raises:
        RunError: if names or shapes differ.
    """
    state = model_state(optimizer)
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
