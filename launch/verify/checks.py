"""How ``verify`` judges a case: this rank's results against its part of the truth.

The truth is textbook PyTorch on the whole inputs in fp64, or the definition of filtered gradients,
which every rank computes for itself; the budget comes from the same in the dtype under test. So no
collective of ours, and no mistake in one, can spoil both sides of a comparison.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
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
    vocab_range,
)
from flce_dist.arguments.options import Impl
from flce_dist.launch.process_group import Group, own_tokens, rank_and_size, reduced
from flce_dist.launch.verify.best import best_results, check_best
from flce_dist.launch.verify.cases import Case, Shape, Variant
from flce_dist.launch.verify.data import Data, make_data
from flce_dist.reference import (
    LogitOptions,
    reference_linear_cross_entropy,
    reference_linear_divergence,
    reference_linear_logprob,
)
from flce_dist.testing import ErrorBudget, error_budget, relative_rms

FP32_BUDGET = 1e-5
"""Relative error that loss, lse, logprob and entropy may have: they are fp32 in every dtype."""

TRUNCATED_BUDGETS = {"other": 1e-4, "entropy": 3e-5}
"""The same of scores on GPUs, where tensor cores truncate a logit of 12 by up to 3e-6 of it: other
is below 1 there, and entropy changes by more than the logit."""

FEW_TOKENS = 128
"""With fewer, one token may rule an RMS, and chance may make eager PyTorch's error small."""
DRAWS = 16
"""Of inputs of so few tokens: the largest error of eager PyTorch counts."""

Results = dict[str, Tensor]
"""dhidden, dweight, dbias, and what a call returns by the names of its fields."""

_DIVERGENCE_NAMES = tuple(
    "correct" if name == "same_best" else name for name in DivergenceWithMetrics._fields
)


@dataclass(frozen=True)
class Truth:
    """Results on the whole inputs: in fp64, and as eager PyTorch has them in the tested dtype."""

    oracle: Results
    eager: Results
    dtype: torch.dtype
    draws: Callable[[], list["Truth"]] | None = None
    """Of few tokens: makes the same of other draws of the inputs, once."""


def make_truth(
    data: Data, variant: Variant, metric_gradients: bool, filter_eps: float | None, P: int
) -> Truth:
    """Compute a variant by textbook PyTorch, twice.

    Filtered gradients are those of their definition, with the error of eager PyTorch's exact ones.
    """
    if variant.best:
        return Truth({}, {}, data.hidden.dtype)  # ``check_best`` has one of its own
    dtypes = (torch.float64, data.hidden.dtype)
    oracle, eager = (_textbook(data, variant, dtype, metric_gradients) for dtype in dtypes)
    truth = Truth(oracle, eager, data.hidden.dtype)
    if not filter_eps:
        return truth
    starts = [vocab_range(len(data.weight), rank, P)[0] for rank in range(P)]
    options = {"dloss": data.dloss, "bias": data.bias, **_options(variant, data)}
    operands = data.hidden, data.weight, data.labels
    defined = filtered.filtered_gradients(*operands, eps=filter_eps, shard_starts=starts, **options)
    for name in oracle.keys() & {"dhidden", "dweight", "dbias"}:
        gradient = getattr(defined, name)
        eager[name] = gradient + (eager[name] - oracle[name])
        oracle[name] = gradient
    oracle["kept_share"] = defined.kept.double().mean()
    oracle["rank_one_mass"] = defined.rank_one_mass
    return truth


def inputs_and_truths(
    variant: Variant, shape: Shape, P: int, dtype: torch.dtype, device: torch.device, *, seed: int
) -> tuple[Data, Callable[[bool, float | None], Truth]]:
    """Return a variant's inputs, and a function that makes and keeps its truths.

    The function takes ``metric_gradients`` and ``filter_eps`` of a case.
    """
    draw = functools.partial(make_data, variant, shape, P, dtype, device)
    data = draw(seed)

    @functools.cache
    def truth(metric_gradients: bool, filter_eps: float | None) -> Truth:
        def make(inputs: Data) -> Truth:
            return make_truth(inputs, variant, metric_gradients, filter_eps, P)

        seeds = range(seed + 1, seed + 1 + DRAWS)
        draws = functools.cache(lambda: [make(draw(seed)) for seed in seeds])
        return replace(make(data), draws=draws if shape.T < FEW_TOKENS else None)

    return data, truth


def run_case(
    case: Case, data: Data, truth: Truth, tp_group: Group, impl: Impl | None
) -> dict[str, ErrorBudget]:
    """Compute ``case`` on this rank and compare; every rank must call this."""
    T = len(data.labels)
    rows = len(data.weight)
    tokens = own_tokens(T, tp_group) if case.sequence_parallel else slice(T)
    own = slice(*vocab_range(rows, *rank_and_size(tp_group)))
    if case.variant.best:
        placed = _placed(case, own, tp_group, impl)
        options = _options(case.variant, data)
        results = best_results(data, tokens, own, case.variant.best, {**placed, **options})
        same = _same_bits(results["lse"], tp_group)
        return {**check_best(results, data, options), **same}
    results = _results(case, data, tokens, own, tp_group, impl)
    expected = _expected(case, truth)
    if results.keys() != expected:
        raise ValueError(f"results must be {sorted(expected)}, got {sorted(results)}")
    parts = {"dhidden": tokens, "dweight": own, "dbias": own}
    checks = {name: _check(name, x, truth, parts.get(name)) for name, x in results.items()}
    checks |= _same_bits(results["loss" if case.variant.over is None else "logprob"], tp_group)
    if case.filter_eps == 0.0:
        exact = _results(replace(case, filter_eps=None), data, tokens, own, tp_group, impl)
        errors = [relative_rms(x, exact[name]) for name, x in results.items()]
        checks["same as recompute"] = ErrorBudget(sum(errors), 0.0)  # NaN if one is
    return checks


def _expected(case: Case, truth: Truth) -> set[str]:
    """Names of the results that a case must have: a call without metrics has not all of a truth."""
    variant = case.variant
    names = set(truth.oracle)
    if variant.divergence is not None:
        names.remove("lse")  # of the student's logits: a divergence does not return it
    if variant.over is None and not variant.metrics:
        names -= set(_names(case)[1:])
    return names


def _results(
    case: Case, data: Data, tokens: slice, own: slice, tp_group: Group, impl: Impl | None
) -> Results:
    """Call the op forward and backward on this rank's tokens and its own rows."""
    call: Any = linear_cross_entropy_with_metrics if case.variant.metrics else linear_cross_entropy
    if case.variant.divergence is not None:
        call = linear_divergence_with_metrics if case.variant.metrics else linear_divergence
    eps = case.filter_eps
    leaves = _leaves(data, case.variant, tokens, own, data.hidden.dtype)
    options = {**_placed(case, own, tp_group, impl), **leaves, **_options(case.variant, data)}
    if case.variant.over is not None:
        has_entropy = case.variant.entropy
        scores = linear_logprob(schedule=case.schedule, with_entropy=has_entropy, **options)
        return _scores(scores, leaves, data)
    if case.variant.low_rank:
        options |= _low_rank(leaves)
    parts = {"teacher_hidden": tokens, "teacher_weight": own, "teacher_bias": own}
    out = call(
        labels=data.labels,
        **{name: x[parts[name]] for name, x in data.teacher.items()},
        schedule=case.schedule if eps is None else filtered.schedule(eps),
        max_logits_bytes=case.max_logits_bytes,
        max_counted=int((data.labels != -100).sum()) if case.variant.counted else None,
        skip_ignored=case.variant.skips,
        **options,
    )
    outputs = tuple(out) if case.variant.metrics else (out,)
    names = _names(case) if case.variant.metrics else ("loss",)
    return _differentiate(outputs, leaves, data, case.metric_gradients, names)


def _placed(case: Case, own: slice, tp_group: Group, impl: Impl | None) -> dict[str, Any]:
    return {
        "vocab_range": (own.start, own.stop) if case.variant.uneven else None,
        "tp_group": tp_group,
        "sequence_parallel": case.sequence_parallel,
        "impl": impl,
    }


def _same_bits(x: Tensor, tp_group: Group) -> dict[str, ErrorBudget]:
    """Compare bits: how far apart are the ranks' losses?"""
    if tp_group is None:
        return {}
    low, high = (reduced(x.clone(), tp_group, op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
    return {"same loss": ErrorBudget(float((high - low).abs().sum()), 0.0)}


def _scores(out: Sequence[Tensor | None], leaves: dict[str, Tensor], data: Data) -> Results:
    """Send a gradient back through every score; return them and the gradients, by name."""
    scores = {k: x for k, x in zip(TokenScores._fields, out, strict=True) if x is not None}
    upstream = [data.dmetrics[1, :, None].expand(scores["logprob"].shape), *data.dmetrics]
    _back(list(scores.values()), upstream[: len(scores)])
    return {name: x.detach() for name, x in {**scores, **_gradients(leaves)}.items()}


def _gradients(leaves: dict[str, Tensor]) -> Results:
    """Return the gradients of all leaves that require one, zeros where there is none."""
    required = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    return {
        f"d{name}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in required.items()
    }


def _back(roots: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
    """Send upstream gradients back, unless no operand needs a gradient."""
    grads = [g.to(root.dtype) for g, root in zip(upstream, roots, strict=True)]
    if any(root.requires_grad for root in roots):
        torch.autograd.backward(roots, grads)


def _options(variant: Variant, data: Data) -> dict[str, Any]:
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


def _names(case: Case) -> tuple[str, ...]:
    """Names of what a call with metrics returns."""
    if case.variant.divergence is not None:
        return _DIVERGENCE_NAMES
    if case.filter_eps is not None:
        return filtered.FilteredLossWithMetrics._fields
    return LossWithMetrics._fields


def _leaves(
    data: Data, variant: Variant, tokens: slice, own: slice, dtype: torch.dtype
) -> dict[str, Any]:
    """Return copies of hidden, weight and, if there is one, bias."""
    parts = {"hidden": data.hidden[tokens], "weight": data.weight[own]}
    if data.bias is not None:
        parts["bias"] = data.bias[own]
    trained = variant.trained
    return {k: x.to(dtype, copy=True).requires_grad_(k in trained) for k, x in parts.items()}


def _low_rank(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of a call whose low rank is the last half of the columns, with the others."""
    hidden = leaves["hidden"]
    weight = leaves["weight"]
    n = hidden.shape[1] // 2
    low_rank = hidden[:, n:], weight[:, n:]
    return {"hidden": hidden[:, :n], "weight": weight[:, :n].detach(), "low_rank": low_rank}


def _textbook(data: Data, variant: Variant, dtype: torch.dtype, metric_gradients: bool) -> Results:
    leaves = _leaves(data, variant, slice(None), slice(None), dtype)
    options = _options(variant, data)
    if variant.over is not None:
        logprob, lse, other, entropy = reference_linear_logprob(**leaves, **options)
        of_rest = other if variant.over == "vocabulary" else None
        scores = logprob, lse, of_rest, entropy if variant.entropy else None
        return _scores(scores, leaves, data)
    if variant.divergence is not None:
        theirs: dict[str, Any] = {name: x.to(dtype) for name, x in data.teacher.items()}
        outputs = reference_linear_divergence(labels=data.labels, **leaves, **theirs, **options)
        results = _differentiate(outputs, leaves, data, False, _DIVERGENCE_NAMES)
        return {**results, "lse": _lse(leaves, data, options)}
    operands = leaves
    if variant.low_rank:
        weight = leaves["weight"]
        n = leaves["weight"].shape[1] // 2
        operands = {**leaves, "weight": torch.cat((weight[:, :n].detach(), weight[:, n:]), 1)}
    outputs = reference_linear_cross_entropy(labels=data.labels, **operands, **options)
    return _differentiate(outputs, leaves, data, metric_gradients, LossWithMetrics._fields)


@torch.no_grad()
def _lse(leaves: dict[str, Any], data: Data, options: dict[str, Any]) -> Tensor:
    """Return lse of the student's logits, whose size says how far off differences of them are."""
    names = options.keys() & LogitOptions.__annotations__.keys()
    of_logits: Any = {name: options[name] for name in names}
    return reference_linear_cross_entropy(labels=data.labels, **leaves, **of_logits)[1]


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


def _check(name: str, actual: Tensor, truth: Truth, part: slice | None) -> ErrorBudget:
    check = _compared(name, actual, truth, part)
    if check.met or not check.budget or truth.draws is None:
        return check
    lse = truth.oracle["lse"]
    if part is None:  # a difference of logits is as far off as they are
        scale, size = (x.double().square().mean().sqrt().item() for x in (lse, truth.oracle[name]))
        return replace(check, budget=check.budget * max(1.0, scale / size)) if size else check
    others = [(draw.eager[name][part], draw.oracle[name][part]) for draw in truth.draws()]
    budgets = [error_budget(e, o, e, dtype=truth.dtype).budget for e, o in others]
    rounding = 2 * torch.finfo(torch.float32).eps * lse.abs().max().item()  # of one exponential
    return replace(check, budget=max([check.budget, *budgets]) + rounding)


def _compared(name: str, actual: Tensor, truth: Truth, part: slice | None) -> ErrorBudget:
    oracle = truth.oracle[name]
    if part is not None:
        eager = truth.eager[name]
        return error_budget(actual, oracle[part], eager[part], dtype=truth.dtype)
    if name == "correct":
        return ErrorBudget(float((actual != oracle).sum()), 0.0)
    # A sum of masses that are rounded to the dtype under test, each relative to itself.
    rounding = torch.finfo(truth.dtype).eps if name == "rank_one_mass" else 0.0
    budgets = TRUNCATED_BUDGETS if actual.is_cuda and "other" in truth.oracle else {}
    budget = budgets.get(name, FP32_BUDGET) + rounding
    return ErrorBudget(relative_rms(actual, oracle), budget)
