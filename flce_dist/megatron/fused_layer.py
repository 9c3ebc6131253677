"""The output layer that is asked for a loss instead of logits, whatever its class in megatron-core.

s sequence, b batch, H hidden size, P tensor-parallel size.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flce_dist.api import LossWithMetrics, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.megatron.layouts import by_sequence, check_tokens, copy_transposed, transposed


class FusedLayer:
    """What replaced output layers share, beside a ``ColumnParallelLinear`` among their bases."""

    loss_keywords: dict[str, Any]  # options of ``linear_cross_entropy``
    question: Callable[[Any, Tensor, Tensor], Any] | None = None
    """What a call returns in place of logits, a function of the layer, its hidden states and its
    weight; set for one call, by ``HeadCall``."""
    scoring: Callable[..., Any] | None = None  # the question of a call of ``scores``
    keeps_metrics = False  # as the next one, see ``use_linear_cross_entropy``
    last_metrics: LossWithMetrics | None = None

    def forward(
        self: Any,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Any, Tensor | None]:
        """Return an answer and None; without a question logits [s, b, V] and the bias.

        The logits are this rank's, or gathered ones of all. Of a loss or scores there is no bias
        to add, and they are the same on all ranks.
        """
        if self.question is not None:
            return self.question(self, input_, self.weight if weight is None else weight), None
        logits, bias = super().forward(input_, weight, runtime_gather_output)  # type: ignore[misc]
        scale = self.loss_keywords["logit_scale"]
        if scale != 1.0:
            logits = logits * scale
        softcap = self.loss_keywords["softcap"]
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        return logits, bias

    own_forward = forward  # unlike forward never that of a class which libraries make from this one

    def token_loss(
        self: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        scale: float = 1.0,
        **changes: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss of ``labels`` [b, s], by default as [b, s] fp32, and what was correct.

        That is [b, s] bool in training with multi-token prediction, which counts it, or with
        metrics; else None. For a filtered schedule, whose blocks of tokens should be of one
        sequence each, ``hidden`` is copied into that order.
        """
        counts_correct = self.training and bool(getattr(self.config, "mtp_num_layers", None))
        with_metrics = self.keeps_metrics or counts_correct
        function = linear_cross_entropy_with_metrics if with_metrics else linear_cross_entropy
        check_tokens(self, function.__name__, hidden, labels=labels)
        keywords = {**self.loss_keywords, **changes, **self.keywords_for(weight, scale)}
        ranks = 0  # whose tokens are put into another order
        if not isinstance(keywords["schedule"], str):
            ranks = self.tp_group.size() if self.sequence_parallel else 1
        hidden = by_sequence(hidden, min(ranks, 1))
        labels = by_sequence(transposed(labels), ranks)
        result: Any = function(hidden, weight, labels, **keywords)
        if not with_metrics:
            return copy_transposed(by_sequence(result, ranks)), None
        result = result._make(copy_transposed(by_sequence(x, ranks)) for x in result)
        if self.keeps_metrics:
            self.last_metrics = result._make(x.detach() for x in result)
        return result.loss, result.correct

    def keywords_of_logits(self: Any, weight: Tensor, scale: float) -> dict[str, Any]:
        """Return keywords of a call that has no loss options: ``keywords_for``, and the model's."""
        own = {name: self.loss_keywords[name] for name in ("softcap", "vocab_size", "impl")}
        return {**own, **self.keywords_for(weight, scale)}

    def keywords_for(self: Any, weight: Tensor, scale: float) -> dict[str, Any]:
        """Return keywords of a call that are the layer's own; ``scale`` is the model's (MuP)."""
        fuses = self.gradient_accumulation_fusion
        if fuses and weight is not self.weight and hasattr(weight, "__fsdp_param__"):
            raise NotImplementedError(
                "gradient_accumulation_fusion with Megatron-FSDP and tied embeddings is not "
                "supported: FSDP overwrites main_grad, and two layers would add to it"
            )
        scale = scale * self.loss_keywords["logit_scale"]
        bias = None if self.skip_bias_add else self.bias
        if bias is not None and scale != 1.0:
            bias = bias * scale  # Megatron scales logits that contain it
        return {
            "logit_scale": scale,
            "bias": bias,
            "tp_group": self.tp_group,
            "sequence_parallel": self.sequence_parallel,
            "accumulate_dweight": fuses,
        }
