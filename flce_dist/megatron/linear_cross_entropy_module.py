"""The output layer of megatron-core's development branch, under its own name."""

from typing import Any

from megatron.core.transformer import linear_cross_entropy
from torch import Tensor

from flce_dist.megatron.fused_layer import FusedLayer


class LinearCrossEntropyModule(FusedLayer, linear_cross_entropy.LinearCrossEntropyModule):
    """``LinearCrossEntropyModule`` whose fused loss, too, is ours."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        output_cross_entropy_loss: bool = False,
        labels: Tensor | None = None,
        reduction: str = "none",
        ignore_index: int = -100,
    ) -> Any:
        """With ``output_cross_entropy_loss`` return the loss of ``labels`` [b, s], as [b, s]."""
        if not output_cross_entropy_loss:
            return super().forward(input_, weight, runtime_gather_output)
        assert labels is not None, "labels must be given with output_cross_entropy_loss=True"
        changes: dict[str, Any] = {"reduction": reduction}
        if ignore_index != -100:
            changes["ignore_index"] = ignore_index
        weight = self.weight if weight is None else weight
        loss, _ = self.token_loss(input_, weight, labels, **changes)
        return loss

    own_forward = forward
