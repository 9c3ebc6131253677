"""Make megatron-core's ``GPTModel`` (0.14 to 0.19) compute its loss without logits.

``GPTModel`` builds its output layer itself, so there is no spec to put another one into. It calls
``logits, _ = self.output_layer(hidden, weight=...)`` and then either
``self.compute_language_model_loss(labels, logits)`` or, without labels, ``logits.transpose(0, 1)``.
Both ends are replaced: the output layer gets a subclass of its own class, which returns a
``LazyLogits``; the loss function asks that object for the loss. Parameters, their names,
initialisation and ``sharded_state_dict`` stay as they are. Multi-token prediction goes the same
way, once per depth; 0.19 also asks there for the most likely token.

s sequence, b batch, H hidden size, P tensor-parallel size.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flce_dist.api import linear_cross_entropy
from flce_dist.op import checks
from flce_dist.options import Impl, LossOptions, Schedule

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

_WINDOW = 8192
"""Columns of logits that exist at one time where only the largest is wanted."""


def use_linear_cross_entropy(
    model: "GPTModel",
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    schedule: Schedule = "auto",
    max_logits_bytes: int | None = None,
    impl: Impl | None = None,
) -> None:
    """Let ``model`` compute its loss by ``linear_cross_entropy``; everything else stays.

    Call it after the model is built and before it is wrapped in DDP. With labels [b, s] the model
    then returns the loss [b, s] fp32 as before; without labels it returns real logits, with
    ``logit_scale`` and ``softcap`` applied. The tensor-parallel group, sequence parallelism and
    tied embeddings follow the model. The loss never passes through ``config``'s own cross-entropy
    fusions.

    Args:
        model: a ``GPTModel`` (or subclass) on the pipeline stage that owns the output layer.
        vocab_size: the true vocabulary size, if the model's is padded; the padding columns then
            take no part in the loss. They stay in logits that are asked for without labels.
        ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale, schedule,
            max_logits_bytes, impl: see ``linear_cross_entropy``.

    Raises:
        ValueError: if the model has no output layer here, or already has ours; or an option is
            wrong.
        NotImplementedError: with gradient_accumulation_fusion, defer_embedding_wgrad_compute, MuP,
            an output layer with a bias or of another class; or schedule="in_forward", which has
            no per-token loss.
    """
    layer: Any = getattr(model, "output_layer", None)
    _check(layer, model.config, schedule)
    keywords: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss_weight": z_loss_weight,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "vocab_size": vocab_size,
        "schedule": schedule,
        "max_logits_bytes": max_logits_bytes,
        "impl": impl,
    }
    options = checks.check_options(LossOptions(reduction="none", **keywords))
    if options.vocab_size is not None and options.vocab_size > layer.output_size:
        raise ValueError(
            f"vocab_size must be at most the {layer.output_size} rows of model.output_layer, "
            f"got {vocab_size}"
        )
    layer.loss_keywords = {name: getattr(options, name) for name in keywords}
    layer.__class__ = _output_layer_class()
    # A plain function: the logits know their layer, so it needs no reference to this model.
    model.compute_language_model_loss = _language_model_loss


@dataclass(frozen=True)
class LazyLogits:
    """What the output layer returns in place of logits: all that is needed to compute them.

    Attributes:
        hidden: [s, b, H]; this rank's [s / P, b, H] if ``sequence_parallel``.
        weight: the tied embedding passed for this call, or None for the layer's own.
        sequence_parallel: the layer's setting at the time of the call. Megatron's dynamic batching
            switches it off around the call only.
    """

    layer: "ColumnParallelLinear"
    hidden: Tensor
    weight: Tensor | None
    runtime_gather_output: bool | None
    sequence_parallel: bool

    def loss(self, labels: Tensor) -> Tensor:
        """Per-token loss of ``labels`` [s, b] int64, as [s, b] fp32, the same on all P ranks."""
        # Again through the module, so that hooks which gather or release parameters around a
        # call see each use of the weight.
        return self.layer(self.hidden, self.weight, labels=labels)

    def materialize(self) -> Tensor:
        """Real logits: [s, b, V] of this rank's rows, or of all where the layer gathers them."""
        layer_setting = self.layer.sequence_parallel
        self.layer.sequence_parallel = self.sequence_parallel
        try:
            return self.layer(self.hidden, self.weight, self.runtime_gather_output, lazy=False)
        finally:
            self.layer.sequence_parallel = layer_setting

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """What ``GPTModel`` calls when it has no labels."""
        return self.materialize().transpose(dim0, dim1)

    def size(self, dim: int) -> int:
        """The number of rows of this rank's weight, for ``dim`` = -1."""
        assert dim == -1, "only the vocabulary's size is known without a gather"
        return self.layer.output_size_per_partition

    def max(self, dim: int) -> tuple[Tensor, Tensor]:
        """Largest logit among this rank's rows, before any softcap, and its row; [s, b] each."""
        assert dim == -1, "only the maximum over the vocabulary is taken without logits"
        return self.layer(self.hidden, self.weight, largest=True)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.argmax:
            return NotImplemented
        logits, kwargs = args[0], kwargs or {}
        if logits.layer.tp_group.size() == 1:
            return logits.max(**kwargs)[1]
        return logits.materialize().argmax(**kwargs)  # of gathered logits


def _language_model_loss(labels: Tensor, logits: LazyLogits) -> Tensor:
    """``GPTModel.compute_language_model_loss``: labels [b, s] to the loss [b, s]."""
    return logits.loss(labels.transpose(0, 1)).transpose(0, 1).contiguous()


@cache
def _output_layer_class() -> type:
    """The subclass of megatron-core's ``ColumnParallelLinear``, made at the first use of it."""
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        gather_from_sequence_parallel_region,
    )

    class LinearCrossEntropyOutputLayer(ColumnParallelLinear):
        """``ColumnParallelLinear`` that postpones its product until it is known what it is for."""

        loss_keywords: dict[str, Any]

        def forward(
            self,
            input_: Tensor,
            weight: Tensor | None = None,
            runtime_gather_output: bool | None = None,
            *,
            labels: Tensor | None = None,
            largest: bool = False,
            lazy: bool = True,
        ) -> Any:
            if labels is not None:
                return linear_cross_entropy(
                    input_,
                    self.weight if weight is None else weight,
                    labels,
                    reduction="none",
                    tp_group=self.tp_group,
                    sequence_parallel=self.sequence_parallel,
                    **self.loss_keywords,
                )
            if largest:
                return self._largest(input_, self.weight if weight is None else weight)
            if lazy:
                logits = LazyLogits(
                    self, input_, weight, runtime_gather_output, self.sequence_parallel
                )
                return logits, None
            logits, _ = super().forward(input_, weight, runtime_gather_output)
            scale, softcap = self.loss_keywords["logit_scale"], self.loss_keywords["softcap"]
            if scale != 1.0:
                logits = logits * scale
            return logits if softcap is None else softcap * (logits / softcap).tanh()

        @torch.no_grad()
        def _largest(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            """Row maximum and its place by windows of the vocabulary; one GEMM in all."""
            if self.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
            best = hidden.new_full(hidden.shape[:-1], -float("inf"))
            place = torch.zeros_like(best, dtype=torch.long)
            for start in range(0, weight.shape[0], _WINDOW):
                logits = hidden @ weight[start : start + _WINDOW].T
                value, column = (logits * self.loss_keywords["logit_scale"]).max(dim=-1)
                place = torch.where(value > best, column + start, place)
                best = torch.maximum(best, value)
            return best, place

    return LinearCrossEntropyOutputLayer


def _check(layer: Any, config: Any, schedule: Schedule) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    if layer is None:
        raise ValueError(
            "model must have an output_layer; on pipeline stages with post_process=False there is "
            "none, and nothing to replace"
        )
    if isinstance(layer, _output_layer_class()):
        raise ValueError("model must not have its output layer replaced twice")
    if type(layer) is not ColumnParallelLinear:
        raise NotImplementedError(
            f"model.output_layer must be a ColumnParallelLinear, got {type(layer).__name__}"
        )
    if layer.bias is not None:
        raise NotImplementedError("model.output_layer with a bias is not supported")
    for name in ("gradient_accumulation_fusion", "defer_embedding_wgrad_compute", "use_mup"):
        if getattr(config, name, False):
            raise NotImplementedError(f"config.{name}=True is not supported; set it to False")
    if schedule == "in_forward":
        raise NotImplementedError(
            'schedule="in_forward" needs a summed loss, but Megatron asks for one per token; '
            'use "auto", "cached" or "recompute"'
        )
