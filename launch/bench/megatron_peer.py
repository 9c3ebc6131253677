"""Megatron's own output layer and loss as peers of the benchmark.

As ``GPTModel`` of megatron-core runs them in training: the GEMM of ``ColumnParallelLinear``, which
under sequence parallelism gathers and scatters; then its vocabulary-parallel loss, plain or fused.
Without ``gradient_accumulation_fusion``, so that the gradient of the weight is returned as ours is.

T = tokens, H = hidden size, V = vocabulary rows on this rank, P = ranks.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.launch.process_group import quiet_megatron

_current_device: Callable[[], Any] = torch.cuda.current_device


def load(
    fused: bool, tp_group: dist.ProcessGroup | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return ``loss_of(hidden, weight, labels)``, sequence parallel if hidden is [T / P, H]."""
    quiet_megatron()
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import (
        linear_with_grad_accumulation_and_async_allreduce as linear,
    )

    group = _start(1 if tp_group is None else tp_group.size())

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        sequence_parallel = len(hidden) < len(labels)
        logits = linear(
            hidden.unsqueeze(1),  # Megatron's [s / P, b, H]
            weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=group.size() > 1 and not sequence_parallel,
            sequence_parallel=sequence_parallel,
            tp_group=group,
        )
        if fused:
            return fused_vocab_parallel_cross_entropy(logits, labels.unsqueeze(1), group).mean()
        return vocab_parallel_cross_entropy(logits, labels.unsqueeze(1)).mean()

    return loss_of


def _start(P: int) -> dist.ProcessGroup:
    """Make megatron-core's groups, once, and return its tensor-parallel one."""
    from megatron.core import parallel_state

    if not torch.cuda.is_available():
        # megatron-core asks for the current GPU wherever it makes a buffer, and takes any device.
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore
    if not dist.is_initialized():  # one process; Megatron's path has collectives there too
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(P, create_gloo_process_groups=False)
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    assert group.size() == P
    return group


def drop_buffers() -> None:
    """Free the memory that megatron-core keeps for gathered hidden states."""
    from megatron.core import parallel_state

    parallel_state.get_global_memory_buffer().buffer.clear()


def stop() -> None:
    """Forget megatron-core's groups, if there are any."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
        for name, value in list(vars(parallel_state).items()):
            if isinstance(value, dist.ProcessGroup):  # it forgets to let go of some
                setattr(parallel_state, name, None)
        torch.cuda.current_device = _current_device
