"""Make megatron-core's ``GPTModel`` (0.14 to 0.19) compute its loss without logits.

``GPTModel`` builds its output layer itself; no spec can replace it. It calls
``logits, _ = self.output_layer(hidden, weight=...)`` and then either
``self.compute_language_model_loss(labels, logits)`` or, without labels, ``logits.transpose(0, 1)``.
Both are replaced: the output layer becomes an instance of a subclass, which returns ``LazyLogits``,
and the loss function calls ``LazyLogits.loss``. Parameters, their names, initialisation and
``sharded_state_dict`` are unchanged. Multi-token prediction makes the same calls once per depth;
0.19 also takes the most likely token there.

s sequence, b batch, H hidden size, P tensor-parallel size.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flce_dist.api import linear_cross_entropy
from flce_dist.op import checks
from flce_dist.options import Schedule, options_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

_WINDOW = 8192
"""Columns of logits that exist at once while the largest logit is searched."""

_FIXED = {
    "reduction": "none",
    "sequence_parallel": False,  # the layer passes its own setting
    "vocab_range": None,
    "reduce_dhidden": True,
    "reduce_in_fp32": False,
    "tp_invariant": False,
    "accumulate_dweight": False,
}
"""Options that the model decides or the output layer does not support."""


def use_linear_cross_entropy(model: "GPTModel", **options: Any) -> None:
    """Make ``model`` compute its loss by ``linear_cross_entropy``; nothing else changes.

    Call it after the model is built and before it is wrapped in DDP. With labels [b, s] the model
    then returns the loss [b, s] fp32 as before; without labels it returns real logits, with
    ``logit_scale`` and ``softcap`` applied. The tensor-parallel group, sequence parallelism and
    tied embeddings are the model's. ``config``'s own cross-entropy fusions are not used.

    Args:
        model: a ``GPTModel`` (or subclass) on the pipeline stage that owns the output layer.
        **options: ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale, vocab_size,
            schedule, max_logits_bytes and impl, as in ``linear_cross_entropy``. Logits that are
            returned without labels keep the padding columns from ``vocab_size`` on.

    Raises:
        ValueError: the model has no output layer on this stage, its output layer is already
            replaced, or an option is wrong.
        NotImplementedError: with gradient_accumulation_fusion, defer_embedding_wgrad_compute, MuP,
            an output layer with a bias or of another class, or schedule="in_forward", which
            requires a summed loss.
    """
    chosen = options_of(use_linear_cross_entropy, options, **_FIXED)
    layer: Any = getattr(model, "output_layer", None)
    _check(layer, model.config, chosen.schedule)
    chosen = checks.check_options(chosen)
    if chosen.vocab_size is not None and chosen.vocab_size > layer.output_size:
        raise ValueError(
            f"vocab_size must be at most the {layer.output_size} rows of model.output_layer, "
            f"got {chosen.vocab_size}"
        )
    omitted = {*_FIXED, "with_metrics"}
    layer.loss_keywords = {name: x for name, x in vars(chosen).items() if name not in omitted}
    layer.__class__ = _output_layer_class()
    # A plain function without a reference to the model: LazyLogits holds the layer.
    model.compute_language_model_loss = _language_model_loss


@dataclass(frozen=True)
class LazyLogits:
    """What the output layer returns instead of logits: everything needed to compute them.

    Attributes:
        hidden: [s, b, H]; this rank's [s / P, b, H] if ``sequence_parallel``.
        weight: the tied embedding if one was passed, None for the layer's own weight.
        sequence_parallel: the layer's setting during the call, which Megatron's dynamic batching
            switches off for that time only.
    """

    layer: "ColumnParallelLinear"
    hidden: Tensor
    weight: Tensor | None
    runtime_gather_output: bool | None
    sequence_parallel: bool

    def loss(self, labels: Tensor) -> Tensor:
        """Per-token loss of ``labels`` [s, b] int64, as [s, b] fp32, the same on all P ranks."""
        # Called as a module, so that hooks that gather and release parameters run for each use of
        # the weight.
        return self.layer(self.hidden, self.weight, labels=labels)

    def materialize(self) -> Tensor:
        """Real logits [s, b, V] of this rank's rows, or of all rows if the layer gathers them."""
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
        """The number of rows of this rank's weight; ``dim`` must be -1."""
        assert dim == -1, "only the vocabulary's size is known without a gather"
        return self.layer.output_size_per_partition

    def max(self, dim: int) -> tuple[Tensor, Tensor]:
        """Largest logit of this rank's rows, before any softcap, and its row, each [s, b]."""
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
        """``ColumnParallelLinear`` that delays its GEMM until loss or logits are requested."""

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
            """Largest logit of each token and its row, one window of the vocabulary at a time."""
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
            "model must have an output_layer; pipeline stages with post_process=False have none"
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
