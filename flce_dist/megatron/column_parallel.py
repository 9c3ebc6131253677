"""The output layer of megatron-core's releases, under its own name (Megatron-FSDP asks for it)."""

from megatron.core import tensor_parallel

from flce_dist.megatron.fused_layer import FusedLayer


class ColumnParallelLinear(FusedLayer, tensor_parallel.ColumnParallelLinear):
    """``ColumnParallelLinear`` that makes no logits in the training loss."""
