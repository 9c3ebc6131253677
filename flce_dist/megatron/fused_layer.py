"""The output layer that computes a loss instead of logits, whatever its class in megatron-core.

s sequence, b batch, H hidden size, P tensor-parallel size.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flce_dist.api import LossWithMetrics, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.core.call import extra_schedule
from flce_dist.parallel.collectives import gather_tokens
from flce_dist.scores import TokenScores

_WINDOW = 8192  # columns of logits that exist at once while the largest logit is searched
_FRAMEWORKS = ("torch", "megatron", "megatron_fsdp", "transformer_engine")
"""Their hooks gather and release parameters; any other may look at the logits."""


@dataclass(frozen=True)
class LazyLogits:
    """What the output layer returns in the training loss: everything needed to compute it."""

    layer: Any
    hidden: Tensor  # [s, b, H]; this rank's [s / P, b, H] under sequence parallelism
    weight: Tensor | None  # the tied embedding if one was passed, None for the layer's own weight
    runtime_gather_output: bool | None
    scale: float = 1.0  # what the model multiplied the logits by (MuP)

    def loss(self, labels: Tensor) -> Tensor:
        """Per-token loss of ``labels`` [s, b] int64, as [s, b] fp32, the same on all P ranks."""
        return self._in_layer(FusedLayer.token_loss, labels=labels, scale=self.scale)

    def __mul__(self, factor: float) -> "LazyLogits":
        if not isinstance(factor, int | float):
            return NotImplemented
        if self.layer.loss_keywords["softcap"] is not None:
            raise NotImplementedError(
                "softcap is not supported with a model that scales logits after it (MuP), got "
                f"softcap={self.layer.loss_keywords['softcap']} and a factor of {factor}"
            )
        return replace(self, scale=self.scale * factor)

    __rmul__ = __mul__

    def size(self, dim: int) -> int:
        """The number of rows of this rank's weight; ``dim`` must be -1."""
        assert dim == -1, "only the vocabulary's size is known without a gather"
        return self.layer.output_size_per_partition

    def max(self, dim: int) -> tuple[Tensor, Tensor]:
        """Largest logit of this rank's rows, before any softcap, and its row, each [s, b]."""
        assert dim == -1, "only the maximum over the vocabulary is taken without logits"
        return self._in_layer(FusedLayer.largest, scale=self.scale)

    def _argmax(self, dim: int) -> Tensor:
        """Column of the largest logit, [s, b]; of gathered logits where there are several ranks."""
        if self.layer.tp_group.size() == 1:
            return self.max(dim)[1]
        gather = self.runtime_gather_output
        with torch.no_grad():
            logits, _ = self._in_layer(FusedLayer.real_logits, runtime_gather_output=gather)
        return (logits * self.scale).argmax(dim)

    def _in_layer(self, method: Callable[..., Any], **keywords: Any) -> Any:
        # As a call of the module, so that hooks gather and release parameters for it.
        compute = functools.partial(method, **keywords)
        return self.layer(self.hidden, self.weight, compute=compute)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0]._argmax(**(kwargs or {})) if func is torch.argmax else NotImplemented

    def __getattr__(self, name: str) -> Any:
        # What a model without labels does to logits in the end, in a call of ``scores``.
        if name in ("transpose", "contiguous") and self.layer.scoring is not None:
            scored = functools.partial(self._in_layer, self.layer.scoring, scale=self.scale)
            return scored if name == "contiguous" else lambda *dims: self
        raise AttributeError(
            f"no logits exist in the training loss, so they have no {name!r}; a forward hook on "
            "the output layer makes it return real ones"
        )


class FusedLayer:
    """What replaced output layers share, beside a ``ColumnParallelLinear`` among their bases."""

    loss_keywords: dict[str, Any]  # options of ``linear_cross_entropy``
    is_lazy = False  # set by the model while it computes its loss, or scores
    scoring: Callable[..., TokenScores] | None = None  # what computes them, in a call of ``scores``
    keeps_metrics = False  # as the next one, see ``use_linear_cross_entropy``
    last_metrics: LossWithMetrics | None = None

    def forward(
        self: Any, input_: Tensor, weight: Tensor | None = None,
        runtime_gather_output: bool | None = None, *,
        compute: Callable[[Any, Tensor, Tensor], Any] | None = None,
    ) -> Any:  # fmt: skip
        """Return lazy or real logits with a bias, or what ``compute`` does."""
        if compute is not None:
            return compute(self, input_, self.weight if weight is None else weight)
        if self.is_lazy and not self._is_watched():
            return LazyLogits(self, input_, weight, runtime_gather_output), None
        return self.real_logits(input_, weight, runtime_gather_output)

    def real_logits(
        self: Any, hidden: Tensor, weight: Tensor | None, runtime_gather_output: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits [s, b, V] of this rank, or gathered ones of all, and the bias."""
        logits, bias = super().forward(hidden, weight, runtime_gather_output)  # type: ignore[misc]
        scale, softcap = self.loss_keywords["logit_scale"], self.loss_keywords["softcap"]
        if scale != 1.0:
            logits = logits * scale
        return logits if softcap is None else softcap * (logits / softcap).tanh(), bias

    def token_loss(
        self: Any, hidden: Tensor, weight: Tensor, labels: Tensor, *, scale: float = 1.0,
        **changes: Any,
    ) -> Tensor:  # fmt: skip
        """Return the loss of ``labels`` [s, b], by default as [s, b] fp32.

        For an ``ExtraSchedule``, whose blocks of tokens should be of one sequence each, ``hidden``
        is copied into that order.
        """
        keywords = {**self.loss_keywords, **changes, **self.keywords_for(weight, scale)}
        ranks = 0  # whose tokens are put into another order
        if extra_schedule(keywords["schedule"]) is not None:
            ranks = self.tp_group.size() if self.sequence_parallel else 1
        hidden, labels = _by_sequence(hidden, min(ranks, 1)), _by_sequence(labels, ranks)
        if not self.keeps_metrics:
            return _by_sequence(linear_cross_entropy(hidden, weight, labels, **keywords), ranks)
        result: Any = linear_cross_entropy_with_metrics(hidden, weight, labels, **keywords)
        result = result._make(_by_sequence(x, ranks) for x in result)
        detached = (x.detach() for x in result)
        self.last_metrics = result._make(x.T if x.dim() == 2 else x for x in detached)
        return result.loss

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
            "logit_scale": scale, "bias": bias, "tp_group": self.tp_group,
            "sequence_parallel": self.sequence_parallel, "accumulate_dweight": fuses,
        }  # fmt: skip

    @torch.no_grad()
    def largest(self: Any, hidden: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Largest logit of each token and its row, one window of the vocabulary at a time."""
        if self.sequence_parallel:
            hidden = gather_tokens(hidden, self.tp_group)
        scale = scale * self.loss_keywords["logit_scale"]
        best = hidden.new_full(hidden.shape[:-1], -float("inf"))
        place = torch.zeros_like(best, dtype=torch.long)
        for start in range(0, weight.shape[0], _WINDOW):
            logits = hidden @ weight[start : start + _WINDOW].T * scale
            if self.bias is not None and not self.skip_bias_add:
                logits = logits + self.bias[start : start + _WINDOW] * scale
            value, column = logits.max(dim=-1)
            place = torch.where(value > best, column + start, place)
            best = torch.maximum(best, value)
        return best, place

    def _is_watched(self: Any) -> bool:
        """Whether a hook that is no framework's would miss the logits, or their gradient."""
        kinds = self._forward_hooks, self._backward_hooks, self._backward_pre_hooks
        return not all(_is_of_framework(hook) for hooks in kinds for hook in hooks.values())


def _by_sequence(x: Tensor, ranks: int) -> Tensor:
    """[s, b, ...] to [ranks * b, s / ranks, ...], in each rank's part one sequence after the other.

    Its own inverse. A scalar stays as it is; so does any x with ``ranks=0``.
    """
    if x.dim() < 2 or not ranks:
        return x
    return x.unflatten(0, (ranks, -1)).transpose(1, 2).flatten(0, 1)


def _is_of_framework(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").split(".")[0] in _FRAMEWORKS
