"""megatron-core on CPUs: it asks for GPUs by name in a few places, and any device does there."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def run_megatron_on_cpu() -> None:
    """Replace what would ask for a GPU in building a model, in its forward and in DDP."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.current_stream = lambda: None


def optimizer_names(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which Megatron's optimizer runs on ``device``."""
    return nullcontext() if device.type == "cuda" else _CpuForCuda()


class _CpuForCuda(TorchFunctionMode):
    """``device="cuda"`` makes tensors on the CPU, whose ``type()`` is named as a GPU's."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        is_name = func is Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.", 1) if is_name else result
