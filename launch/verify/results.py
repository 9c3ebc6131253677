"""What ``verify`` compares: results of the op on this rank, and those of textbook PyTorch.

Both have forward and backward behind them. T = tokens, H = hidden size, V = vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flce_dist import (
    DivergenceWithMetrics,
    LossWithMetrics,
    TokenScores,
    filtered,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
    linear_divergence,
    linear_divergence_with_metrics,
    linear_logprob,
)
from flce_dist.arguments.options import Impl
from flce_dist.launch.process_group import Group
from flce_dist.launch.verify.cases import Case, Variant
from flce_dist.launch.verify.data import Data
from flce_dist.reference import (
    LogitOptions,
    reference_linear_cross_entropy,
    reference_linear_divergence,
    reference_linear_logprob,
)

Results = dict[str, Tensor]
"""dhidden, dweight, dbias, and what a call returns by the names of its fields."""

_DIVERGENCE_NAMES = tuple(
    "correct" if name == "same_best" else name for name in DivergenceWithMetrics._fields
)


def results_of_op(
    case: Case, data: Data, tokens: slice, rows: slice, tp_group: Group, impl: Impl | None
) -> Results:
    """Call the op forward and backward on this rank's tokens and rows."""
    variant = case.variant
    leaves = _leaves(data, variant, tokens, rows, data.hidden.dtype)
    options = {
        **leaves,
        **options_of_rank(case, rows, tp_group, impl),
        **options_of_variant(variant, data),
    }
    if variant.over is not None:
        has_entropy = variant.entropy
        scores = linear_logprob(schedule=case.schedule, with_entropy=has_entropy, **options)
        return _scores(scores, leaves, data)
    call: Any = linear_cross_entropy_with_metrics if variant.metrics else linear_cross_entropy
    if variant.divergence is not None:
        call = linear_divergence_with_metrics if variant.metrics else linear_divergence
        parts = {"teacher_hidden": tokens, "teacher_weight": rows, "teacher_bias": rows}
        options |= {name: x[parts[name]] for name, x in data.teacher.items()}
    if variant.low_rank:
        options |= _low_rank(leaves)
    out = call(
        labels=data.labels,
        schedule=case.schedule if case.filter_eps is None else filtered.schedule(case.filter_eps),
        max_logits_bytes=case.max_logits_bytes,
        max_counted=int((data.labels != -100).sum()) if variant.counted else None,
        skip_ignored=variant.skips,
        **options,
    )
    outputs = tuple(out) if variant.metrics else (out,)
    names = names_of(case) if variant.metrics else ("loss",)
    return _differentiate(outputs, leaves, data, case.metric_gradients, names)


def results_of_textbook(
    data: Data, variant: Variant, dtype: torch.dtype, metric_gradients: bool
) -> Results:
    """Call the reference forward and backward on the whole inputs, in ``dtype``."""
    leaves = _leaves(data, variant, slice(None), slice(None), dtype)
    options = options_of_variant(variant, data)
    if variant.over is not None:
        logprob, lse, other, entropy = reference_linear_logprob(**leaves, **options)
        of_rest = other if variant.over == "vocabulary" else None
        scores = logprob, lse, of_rest, entropy if variant.entropy else None
        return _scores(scores, leaves, data)
    if variant.divergence is not None:
        theirs: dict[str, Any] = {name: x.to(dtype) for name, x in data.teacher.items()}
        outputs = reference_linear_divergence(labels=data.labels, **leaves, **theirs, **options)
        results = _differentiate(
            outputs, leaves, data, metric_gradients=False, names=_DIVERGENCE_NAMES
        )
        return {**results, "lse": _lse(leaves, data, options)}
    operands = leaves
    if variant.low_rank:
        weight = leaves["weight"]
        n = leaves["weight"].shape[1] // 2
        operands = {**leaves, "weight": torch.cat((weight[:, :n].detach(), weight[:, n:]), 1)}
    outputs = reference_linear_cross_entropy(labels=data.labels, **operands, **options)
    return _differentiate(outputs, leaves, data, metric_gradients, LossWithMetrics._fields)


def options_of_rank(case: Case, rows: slice, tp_group: Group, impl: Impl | None) -> dict[str, Any]:
    """Return keywords of the op: how this rank computes its part."""
    return {
        "vocab_range": (rows.start, rows.stop) if case.variant.uneven else None,
        "tp_group": tp_group,
        "sequence_parallel": case.sequence_parallel,
        "impl": impl,
    }


def options_of_variant(variant: Variant, data: Data) -> dict[str, Any]:
    """Return keywords of the op and of the textbook: what is computed."""
    keywords: dict[str, Any] = {"vocab_size": data.vocab_size}
    if data.temperature is not None:
        keywords["temperature"] = data.temperature
    if variant.over is not None:
        return {"ids": data.ids, "over": variant.over, **keywords, **dict(variant.options)}
    if variant.best:
        return {**keywords, **dict(variant.options)}
    keywords["token_weight"] = data.token_weight
    if variant.divergence is not None:
        keywords["kind"] = variant.divergence
    return {"reduction": variant.reduction, **keywords, **dict(variant.options)}


def names_of(case: Case) -> tuple[str, ...]:
    """Names of what a call with metrics returns."""
    if case.variant.divergence is not None:
        return _DIVERGENCE_NAMES
    if case.filter_eps is not None:
        return filtered.FilteredLossWithMetrics._fields
    return LossWithMetrics._fields


def _leaves(
    data: Data, variant: Variant, tokens: slice, rows: slice, dtype: torch.dtype
) -> dict[str, Any]:
    """Return copies of hidden, weight and, if there is one, bias."""
    parts = {"hidden": data.hidden[tokens], "weight": data.weight[rows]}
    if data.bias is not None:
        parts["bias"] = data.bias[rows]
    trained = variant.trained
    return {k: x.to(dtype, copy=True).requires_grad_(k in trained) for k, x in parts.items()}


def _low_rank(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of a call whose low rank is the last half of the columns, with the others."""
    hidden = leaves["hidden"]
    weight = leaves["weight"]
    n = hidden.shape[1] // 2
    low_rank = hidden[:, n:], weight[:, n:]
    return {"hidden": hidden[:, :n], "weight": weight[:, :n].detach(), "low_rank": low_rank}


@torch.no_grad()
def _lse(leaves: dict[str, Any], data: Data, options: dict[str, Any]) -> Tensor:
    """Return lse of the student's logits, whose size says how far off differences of them are."""
    names = options.keys() & LogitOptions.__annotations__.keys()
    of_logits: Any = {name: options[name] for name in names}
    return reference_linear_cross_entropy(labels=data.labels, **leaves, **of_logits)[1]


def _scores(out: Sequence[Tensor | None], leaves: dict[str, Tensor], data: Data) -> Results:
    """Send a gradient back through every score; return them and the gradients, by name."""
    scores = {k: x for k, x in zip(TokenScores._fields, out, strict=True) if x is not None}
    upstream = [data.dmetrics[1, :, None].expand(scores["logprob"].shape), *data.dmetrics]
    _back(list(scores.values()), upstream[: len(scores)])
    return {name: x.detach() for name, x in {**scores, **_gradients(leaves)}.items()}


def _differentiate(
    outputs: tuple[Tensor, ...],
    leaves: dict[str, Tensor],
    data: Data,
    metric_gradients: bool,
    names: tuple[str, ...],
) -> Results:
    """Send the upstream gradients back and return everything, detached and by name."""
    upstream = [data.dloss, *(data.dmetrics if metric_gradients else ())]
    _back(outputs[: len(upstream)], upstream)
    results = {**dict(zip(names, outputs, strict=True)), **_gradients(leaves)}
    return {name: x.detach() for name, x in results.items()}


def _back(roots: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
    """Send upstream gradients back, unless no operand needs a gradient."""
    grads = [g.to(root.dtype) for g, root in zip(upstream, roots, strict=True)]
    if any(root.requires_grad for root in roots):
        torch.autograd.backward(roots, grads)


def _gradients(leaves: dict[str, Tensor]) -> Results:
    """Return the gradients of all leaves that require one, zeros where there is none."""
    required = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    return {
        f"d{name}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in required.items()
    }
