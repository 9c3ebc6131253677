"""``divergence``: of a model from a teacher on the same ranks, in place of the logits of both."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce_dist.arguments.options import Reduction
from flce_dist.divergence import (
    DivergenceWithMetrics,
    linear_divergence,
    linear_divergence_with_metrics,
)
from flce_dist.megatron.token_scores import instead_of_logits, owner_of, transposed

_OF_TEACHER = ("bias", "logit_scale", "softcap")  # of ``keywords_of_logits``
_OWN = ("labels", "token_weight", "temperature", "reduction")
"""Arguments of ``divergence`` that ``linear_divergence`` has, too."""
_OF_MODELS = {*_OF_TEACHER, *(f"teacher_{name}" for name in _OF_TEACHER)} | {
    *"vocab_size impl tp_group sequence_parallel sequence_dim accumulate_dweight".split()
}
"""Keywords of ``linear_divergence`` that both models decide."""


class _Head(NamedTuple):
    """What the teacher's output layer was given."""

    hidden: Tensor  # [s, b, H]; this rank's [s / P, b, H] under sequence parallelism
    weight: Tensor
    keywords: dict[str, Any]


class _Value(NamedTuple):
    loss: Tensor


def divergence(
    model: Any,
    teacher: Any,
    *args: Any,
    labels: Tensor | None = None,
    token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    teacher_weight: Tensor | None = None,
    with_metrics: bool = False,
    reduction: Reduction = "none",
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``teacher(*args, **kwargs)`` without gradients, then the model; return its divergence.

    Both are models that ``use_linear_cross_entropy`` was called with, or what wraps them, on the
    same tensor-parallel ranks. Softcap, logit_scale and bias are those of each; vocab_size and impl
    those of the model's call.

    Args:
        labels: [b, s]; tokens with -100 contribute nothing. Their values are not used otherwise.
        token_weight, temperature: [b, s] as well, or for temperature a number.
        teacher_weight: this rank's rows of the teacher's output layer, cut by ``teacher_shard`` if
            its vocabulary is padded otherwise. By default the layer's own.
        with_metrics: return ``DivergenceWithMetrics``.
        options: further keywords of ``linear_divergence``, such as kind, beta, schedule; a
            teacher_temperature is a number, or [b, s]. What the models decide raises a TypeError.

    Returns:
        The divergence [b, s] with reduction "none", else a scalar; metrics are [b, s].

    Raises:
        ValueError: an argument is wrong, or a model has no plug-in. NotImplementedError: this stage
        of the pipeline has no output layer of one of them, or others have wrapped or patched it.

    Example::

        loss = divergence(model, teacher, ids, positions, None, labels=labels, reduction="mean")
        loss.backward()
    """
    options = _allowed(options or {})
    for side in (model, teacher):
        if not getattr(owner_of(side), "post_process", True):
            raise NotImplementedError(
                "divergence needs the output layers of both models on this rank, got a pipeline "
                "stage without one"
            )
    with torch.no_grad():
        head = instead_of_logits(teacher, _Head, _head_of, args, kwargs, name="teacher")
    if teacher_weight is not None:
        head = head._replace(weight=teacher_weight)
    options = {
        **options,
        "labels": labels,
        "token_weight": token_weight,
        "temperature": temperature,
    }
    scoring = functools.partial(
        _divergence_of,
        head=head,
        with_metrics=with_metrics,
        reduction=reduction,
        options={name: transposed(x) for name, x in options.items()},
    )
    kind = DivergenceWithMetrics if with_metrics else _Value
    outputs = instead_of_logits(model, kind, scoring, args, kwargs)
    return outputs if with_metrics else outputs.loss


def _allowed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, or raise for a name that would be overridden."""
    for name in options:
        if name in _OWN:
            raise TypeError(f"options must not have {name!r}: it is an argument of divergence")
        if name in _OF_MODELS:
            raise TypeError(
                f"options must not have {name!r}: the models decide it, or their calls of "
                "use_linear_cross_entropy"
            )
    return options


def _head_of(layer: Any, hidden: Tensor, weight: Tensor, *, scale: float) -> _Head:
    keywords = layer.keywords_of_logits(weight, scale)
    return _Head(hidden, weight, {f"teacher_{name}": keywords[name] for name in _OF_TEACHER})


def _divergence_of(
    layer: Any,
    hidden: Tensor,
    weight: Tensor,
    *,
    scale: float,
    head: _Head,
    with_metrics: bool,
    reduction: str,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Return the divergence, and any metrics, of hidden [s, b, H]: [s, b] each."""
    keywords = {**options, **head.keywords, **layer.keywords_of_logits(weight, scale)}
    call: Any = linear_divergence_with_metrics if with_metrics else linear_divergence
    outputs = call(hidden, weight, head.hidden, head.weight, reduction=reduction, **keywords)
    return tuple(transposed(x) for x in (outputs if with_metrics else (outputs,)))
