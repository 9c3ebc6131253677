"""The output layer of megatron-core's releases, under its own name (Megatron-FSDP asks for it)."""

from collections.abc import Callable
from typing import Any

from megatron.core import tensor_parallel
from torch import Tensor

from flce_dist.megatron.fused_layer import FusedLayer


class ColumnParallelLinear(FusedLayer, tensor_parallel.ColumnParallelLinear):
    """``ColumnParallelLinear`` that makes no logits in the training loss."""

    plain_forward = tensor_parallel.ColumnParallelLinear.forward

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        compute: Callable[[Any, Tensor, Tensor], Any] | None = None,
    ) -> Any:
        return self.answer(input_, weight, runtime_gather_output, compute)
