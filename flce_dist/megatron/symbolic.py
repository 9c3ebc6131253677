"""What a model's head is inside the model's forward, where the loss takes the place of logits.

Megatron's models call ``logits, _ = self.output_layer(hidden, ...)`` and, with these logits,
``self.compute_language_model_loss(labels, logits)``. In between they may scale them (MuP). So the
first call only notes its arguments, and the second one calls the real head, once and as a module,
which then returns the loss. Nothing here outlives the model's forward.

s sequence, b batch, H hidden size, V rows of the vocabulary on this rank.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from flce_dist.megatron import watchers
from flce_dist.megatron.fused_layer import FusedLayer

_NO_LOGITS = (
    "no logits exist while the model computes its loss, so they have no {!r}; a forward hook on "
    "model.output_layer makes it return real ones"
)


class SymbolicHead:
    """Stands in for ``head``, a submodule of the model that ``layer`` is or is in.

    A call returns ``HeadCall``; if somebody reads the logits, it calls ``head`` and returns
    real ones. Attributes are those of ``head``.
    """

    def __init__(self, head: nn.Module, layer: FusedLayer, *, returns_bias: bool) -> None:
        self.head = head
        self.layer: Any = layer
        self.returns_bias = returns_bias
        self.is_open = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("output_cross_entropy_loss"):  # it is asked for the loss already
            return self.head(*args, **kwargs)
        reader = watchers.reader_of_logits(self.head, self.layer)
        if reader is not None:
            watchers.warn(reader)
            return self.head(*args, **kwargs)
        logits = HeadCall(self, args, kwargs)
        return (logits, None) if self.returns_bias else logits

    @property
    def sequence_parallel(self) -> bool:  # read-only: the head is called later
        return self.layer.sequence_parallel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)


class HeadCall:
    """A call of the head that will be made: its arguments, and what the logits are scaled by."""

    def __init__(
        self, head: SymbolicHead, args: tuple[Any, ...], kwargs: dict[str, Any], scale: float = 1.0
    ) -> None:
        self._head = head
        self._arguments = args, kwargs
        self._scale = scale
        self._labels: Tensor | None = None  # [b, s], of the loss that was computed
        self._correct: Tensor | None = None  # [b, s], whether no logit exceeds the label's

    def loss(self, labels: Tensor) -> Tensor:
        """Call the head for the loss of ``labels`` [b, s] int64: [b, s] fp32 on all ranks."""

        def question(layer: Any, hidden: Tensor, weight: Tensor) -> Tensor:
            loss, self._correct = layer.token_loss(hidden, weight, labels, scale=self._scale)
            self._labels = labels
            return loss

        return self._ask(question)

    def _ask(self, question: Any) -> Any:
        """Return what ``question(layer, hidden, weight)`` returns, asked within the head's call."""
        if not self._head.is_open:
            raise RuntimeError("model.output_layer was called for a forward that has ended")
        args, kwargs = self._arguments
        layer = self._head.layer
        layer.question = question
        try:
            result = self._head.head(*args, **kwargs)
        finally:
            layer.question = None
        return result[0] if self._head.returns_bias else result

    # What Megatron does to logits in between, and behind: MuP's scale; whether multi-token
    # prediction was right; the layout of a model without labels, in a call of ``scores``.

    def __mul__(self, factor: float) -> "HeadCall":
        if not isinstance(factor, (int, float)):
            return NotImplemented
        softcap = self._head.layer.loss_keywords["softcap"]
        if softcap is not None:
            raise NotImplementedError(
                "softcap is not supported with a model that scales logits after it (MuP), got "
                f"softcap={softcap} and a factor of {factor}"
            )
        return HeadCall(self._head, *self._arguments, self._scale * factor)

    __rmul__ = __mul__

    def size(self, dim: int) -> int:
        """Return the number V of rows of this rank's weight; ``dim`` must be -1."""
        assert dim == -1, "only the vocabulary's size is known without a gather"
        return self._head.layer.output_size_per_partition

    def max(self, dim: int) -> tuple[Tensor, Tensor]:
        """Return 1.0 and the label's row where it has the largest logit of all ranks and is here.

        Elsewhere 0.0 and -1: another row. Each [s, b]. Megatron compares ranks' values, and the
        winner's row with the label.
        """
        start = self._head.layer.tp_group.rank() * self.size(dim)
        row = self._prediction() - start
        is_here = (row >= 0) & (row < self.size(dim))
        return is_here.float(), row.where(is_here, -1)

    def _prediction(self) -> Tensor:
        """Return [s, b] int64: the label where no logit exceeds its own, -1 elsewhere."""
        if self._labels is None or self._correct is None:
            raise AttributeError(_NO_LOGITS.format("argmax"))
        return self._labels.where(self._correct, -1).transpose(0, 1)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0]._prediction() if func is torch.argmax else NotImplemented

    def transpose(self, *dims: int) -> "HeadCall":
        self._check_scoring("transpose")
        return self

    def contiguous(self) -> Any:
        """Call the head for its scores: ``TokenScores`` of [b, s, ...]."""
        self._check_scoring("contiguous")
        return self._ask(functools.partial(self._head.layer.scoring, scale=self._scale))

    def _check_scoring(self, name: str) -> None:
        if self._head.layer.scoring is None:
            raise AttributeError(_NO_LOGITS.format(name))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_NO_LOGITS.format(name))


def check_result(result: Any) -> None:
    """Raise if a model returns ``HeadCall``, by itself or in tuples, lists, dictionaries."""
    if isinstance(result, HeadCall):
        raise NotImplementedError(
            "the model returns the logits of model.output_layer beside its loss, but none were "
            "made; register a forward hook on model.output_layer, which makes it return real ones"
        )
    if isinstance(result, (dict, list, tuple)):
        for part in result.values() if isinstance(result, dict) else result:
            check_result(part)
