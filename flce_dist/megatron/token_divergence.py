"""``divergence``: of a model from a teacher on the same ranks, in place of the logits of both."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce_dist.arguments import values
from flce_dist.arguments.options import Kind, Reduction, ScheduleName
from flce_dist.divergence import (
    DivergenceWithMetrics,
    linear_divergence,
    linear_divergence_with_metrics,
)
from flce_dist.megatron.layouts import check_tokens, transposed
from flce_dist.megatron.token_scores import instead_of_logits, owner_of

_OF_TEACHER = ("bias", "logit_scale", "softcap")  # of ``keywords_of_logits``
_OF_TOKENS = ("labels", "token_weight", "temperature", "teacher_temperature")


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
    kind: Kind = "reverse_kl",
    beta: float = 0.5,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    teacher_weight: Tensor | None = None,
    teacher_temperature: float | Tensor | None = None,
    teacher_rows: Tensor | None = None,
    with_metrics: bool = False,
    reduction: Reduction = "none",
    reduce_in_fp32: bool = False,
    tp_invariant: bool = False,
    schedule: ScheduleName = "auto",
    max_logits_bytes: int | None = None,
    max_counted: int | None = None,
    skip_ignored: bool = False,
    **kwargs: Any,
) -> Any:
    """Run ``teacher(*args, **kwargs)`` without gradients, then the model; return its divergence.

    Both are models that ``use_linear_cross_entropy`` was called with, or what wraps them, on the
    same tensor-parallel ranks. Softcap, logit_scale and bias are those of each; vocab_size and impl
    those of the model's call.

    Args:
        labels: [b, s]; tokens with ``ignore_index`` contribute nothing. Their values are not used
            otherwise.
        token_weight, temperature, teacher_temperature: [b, s] as well, or for temperatures a
            number.
        teacher_weight: this rank's rows of the teacher's output layer, cut by ``teacher_shard`` if
            its vocabulary is padded otherwise. By default the layer's own.
        with_metrics: return ``DivergenceWithMetrics``.
        kind, beta and the others: as for ``linear_divergence``.

    Returns:
        The divergence [b, s] with reduction "none", else a scalar; metrics are [b, s].

    Raises:
        ValueError: an argument is wrong, or a model has no plug-in. NotImplementedError: this stage
        of the pipeline has no output layer of one of them, or others have wrapped or patched it.

    Example::

        loss = divergence(model, teacher, ids, positions, None, labels=labels, reduction="mean")
        loss.backward()
    """
    values.flag("with_metrics", with_metrics)
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
    asked: dict[str, Any] = {
        "labels": labels,
        "token_weight": token_weight,
        "temperature": temperature,
        "teacher_temperature": teacher_temperature,
        "kind": kind,
        "beta": beta,
        "ignore_index": ignore_index,
        "teacher_rows": teacher_rows,
        "reduction": reduction,
        "reduce_in_fp32": reduce_in_fp32,
        "tp_invariant": tp_invariant,
        "schedule": schedule,
        "max_logits_bytes": max_logits_bytes,
        "max_counted": max_counted,
        "skip_ignored": skip_ignored,
    }
    scoring = functools.partial(_divergence_of, head=head, with_metrics=with_metrics, asked=asked)
    results = DivergenceWithMetrics if with_metrics else _Value
    outputs = instead_of_logits(model, results, scoring, args, kwargs)
    return outputs if with_metrics else outputs.loss


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
    asked: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Return the divergence, and any metrics, of hidden [s, b, H]: [s, b] each."""
    call: Any = linear_divergence_with_metrics if with_metrics else linear_divergence
    of_tokens = {name: asked[name] for name in _OF_TOKENS}
    check_tokens(layer, call.__name__, hidden, **of_tokens)
    of_tokens = {name: transposed(x) for name, x in of_tokens.items()}
    of_models = {**head.keywords, **layer.keywords_of_logits(weight, scale)}
    keywords = {**asked, **of_tokens, **of_models}
    outputs = call(hidden, weight, head.hidden, head.weight, **keywords)
    return tuple(transposed(x) for x in (outputs if with_metrics else (outputs,)))
