"""megatron-core on CPUs: it asks for GPUs by name in a few places, and any device does there."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flce_dist.launch.train.attention import zigzag


def run_megatron_on_cpu() -> None:
    """Replace what would ask for a GPU in building a model, in its forward and in DDP."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.current_stream = lambda: None
    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = _zigzag_positions


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


def _zigzag_positions(positions: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return zigzag(positions, dim, group.rank(), group.size())
