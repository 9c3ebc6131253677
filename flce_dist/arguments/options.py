"""The options of a call: ``LossOptions`` has all, the dictionaries those that a function takes.

A function with ``**options: Unpack[...]`` names one of them, so that type checkers and editors know
its keywords.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, ParamSpec, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor

from flce_dist.torch_private.compiling import constant_in_graphs

Reduction = Literal["none", "sum", "mean"]
ScheduleName = Literal["auto", "recompute", "cached", "in_forward"]
Impl = Literal["triton", "eager"]
Over = Literal["vocabulary", "ids"]  # what scores at ids are normalised over
Kind = Literal["forward_kl", "reverse_kl", "jsd", "tv"]  # of a divergence


class UnsizedSchedule(Protocol):
    """What a caller may pass as ``schedule`` beside a name: hashable, and equal on all ranks."""

    @property
    def name(self) -> str:
        """By which compiled code refers to it, once it is ``registered``."""

    @property
    def is_recompute(self) -> bool:
        """Whether it is to be schedule "recompute" in every bit."""

    results: ClassVar[type[Any]]
    """``LossWithMetrics``, or a type that begins with its fields."""

    def refuse(self, options: "LossOptions") -> None:
        """Raise NotImplementedError if the schedule does not support these options."""

    def sized(self, recompute: Any) -> Any:
        """Return the ``Compilable`` of a call; ``recompute`` is what recomputing would take."""


ScheduleOption = ScheduleName | UnsizedSchedule
"""A name, or an object such as ``flce_dist.filtered.schedule`` returns."""


@dataclass(frozen=True)
class LossOptions:
    """The keywords of ``linear_cross_entropy``, explained there, but tensors and the group.

    ``with_metrics`` is no keyword: ``linear_cross_entropy_with_metrics`` sets it, and
    ``with_entropy`` of ``linear_logprob``. Nor is ``data_parallel``, with which a sum is one over
    this rank's part of gathered tokens: ``data_parallel_linear_cross_entropy`` sets it.
    """

    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    vocab_size: int | None = None
    vocab_range: tuple[int, int] | None = None
    sequence_parallel: bool = False
    sequence_dim: int = 0
    reduce_dhidden: bool = True
    reduce_in_fp32: bool = False
    tp_invariant: bool = False
    accumulate_dweight: bool = False
    schedule: ScheduleOption = "auto"
    max_logits_bytes: int | None = None
    max_counted: int | None = None
    skip_ignored: bool = False
    impl: Impl | None = None
    with_metrics: bool = False  # set by linear_cross_entropy_with_metrics
    data_parallel: bool = False  # set by data_parallel_linear_cross_entropy

    @property
    def group_name(self) -> str:
        """How the caller calls the group."""
        return "data_group" if self.data_parallel else "tp_group"

    @property
    def chooses_tokens(self) -> bool:
        """Whether tokens that count are computed before others, or alone."""
        return self.skip_ignored or self.max_counted is not None

    @property
    def smoothing_is_capped(self) -> bool:
        """Whether a softcap scales the gradient of smoothing, in each column by another factor."""
        return self.label_smoothing != 0.0 and self.softcap is not None

    def smoothing_cancels(self, dtype: torch.dtype, vocab_size: int) -> bool:
        """Whether D is to hold differences of probabilities and targets, rounded to 16 bits once.

        V equal probabilities have the norm ``1 / sqrt(V)``. The uniform targets cancel nearly all
        of it, so the rounding of probabilities shows where the labels' own share of the targets is
        smaller. Schedules that keep exponentials cannot help it.
        """
        is_rounded = dtype.itemsize == 2 and self.label_smoothing != 0.0
        if isinstance(self.schedule, str):
            computes_logits = self.schedule in ("auto", "recompute")
        else:
            computes_logits = self.schedule.is_recompute
        label_share = 1 - self.label_smoothing
        return is_rounded and computes_logits and label_share**2 * vocab_size < 1

    def logits_of(self, product: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of ``product``, hidden times weight, by PyTorch and with a graph.

        They have its dtype, which under autocast is not that of the bias.
        """
        z = product * self.logit_scale
        if bias is not None:
            z = z + bias.to(z.dtype)
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


NO_KEYWORDS = ("with_metrics", "data_parallel")
KEYWORDS = tuple(field.name for field in fields(LossOptions) if field.name not in NO_KEYWORDS)


class _Work(TypedDict, total=False):
    """How a call is computed."""

    schedule: ScheduleOption
    max_logits_bytes: int | None
    impl: Impl | None


class _Loss(TypedDict, total=False):
    """What a token contributes to the loss, and which do."""

    label_smoothing: float
    z_loss_weight: float
    max_counted: int | None
    skip_ignored: bool


class _Logits(TypedDict, total=False):
    softcap: float | None
    logit_scale: float


class _Sums(TypedDict, total=False):
    reduce_in_fp32: bool
    tp_invariant: bool


class _Split(TypedDict, total=False):
    """How hidden is split over ranks."""

    sequence_parallel: bool
    sequence_dim: int
    reduce_dhidden: bool


class TransformersOptions(_Work, _Loss, _Sums, total=False):
    """Of ``flce_dist.hf.use_linear_cross_entropy``."""

    vocab_size: int | None


class TorchtitanOptions(_Work, _Loss, _Logits, total=False):
    """Of the loss of torchtitan."""

    ignore_index: int
    tp_invariant: bool


class MegatronOptions(_Work, _Loss, _Logits, total=False):
    """Of ``flce_dist.megatron.use_linear_cross_entropy``."""

    reduction: Reduction
    ignore_index: int
    vocab_size: int | None


class StyleOptions(MegatronOptions, _Sums, total=False):
    """Of ``LinearCrossEntropyParallel``."""


class DataParallelOptions(_Work, _Loss, _Logits, _Sums, total=False):
    """Of ``data_parallel_linear_cross_entropy``, beside reduction."""

    ignore_index: int
    vocab_size: int | None
    vocab_range: tuple[int, int] | None
    accumulate_dweight: bool


class CallOptions(DataParallelOptions, _Split, total=False):
    """Of ``linear_cross_entropy``: all of ``KEYWORDS``."""

    reduction: Reduction


class LayerOptions(_Work, _Loss, _Logits, _Sums, _Split, total=False):
    """Of ``LinearCrossEntropy``."""

    reduction: Reduction
    ignore_index: int
    accumulate_dweight: bool


class ScoreOptions(_Work, _Logits, _Sums, _Split, total=False):
    """Of ``linear_logprob``."""

    vocab_size: int | None
    vocab_range: tuple[int, int] | None
    accumulate_dweight: bool


class DivergenceOptions(_Work, _Logits, _Sums, _Split, total=False):
    """Of ``linear_divergence``."""

    reduction: Reduction
    ignore_index: int
    vocab_size: int | None
    vocab_range: tuple[int, int] | None
    accumulate_dweight: bool
    max_counted: int | None
    skip_ignored: bool


class SampleOptions(_Logits, total=False):
    """Of ``linear_sample``."""

    vocab_size: int | None
    vocab_range: tuple[int, int] | None
    sequence_parallel: bool
    sequence_dim: int
    tp_invariant: bool
    impl: Impl | None


class TopKOptions(SampleOptions, total=False):
    """Of ``linear_top_k``."""

    ignore_index: int
    max_counted: int | None


def keywords_of(
    function: Callable[..., Any], options: Mapping[str, Any], **fixed: Any
) -> dict[str, Any]:
    """Return ``options`` and ``fixed``; raise Python's TypeError for fixed and unknown names."""
    for name in options:
        if name not in KEYWORDS or name in fixed:
            allowed = [option for option in KEYWORDS if option not in fixed]
            raise TypeError(_unexpected(function, name, tuple(allowed)))
    return {**options, **fixed}


_P = ParamSpec("_P")
_R = TypeVar("_R")


def refuse_unknown(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise Python's TypeError for the first name that is no keyword of ``function``."""
    parameters = inspect.signature(function).parameters
    for name in names:
        if name not in parameters:
            raise TypeError(_unexpected(function, name, ()))


def signed_like(function: Callable[_P, Any]) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Show the signature of ``function``, to readers and type checkers."""

    def sign(function_to_sign: Any) -> Any:
        function_to_sign.__signature__ = inspect.signature(function)
        return function_to_sign

    return sign


@constant_in_graphs
def _unexpected(function: Callable[..., Any], name: str, options: Iterable[str]) -> str:
    """Return what Python says, and the closest of ``options`` and the function's own keywords."""
    parameters = inspect.signature(function).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    close = difflib.get_close_matches(name.lower(), sorted({*options, *own}), n=1)
    hint = f". Did you mean {close[0]!r}?" if close else ""
    return f"{function.__qualname__}() got an unexpected keyword argument {name!r}{hint}"
