"""How ``verify`` judges a case: this rank's results against its part of the truth.

The truth is textbook PyTorch on the whole inputs in fp64, or the definition of filtered gradients,
which every rank computes for itself; the budget comes from the same in the dtype under test. So no
collective of ours, and no mistake in one, can spoil both sides of a comparison.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import filtered, vocab_range
from flce_dist.arguments.options import Impl
from flce_dist.launch.process_group import Group, own_tokens, rank_and_size, reduced
from flce_dist.launch.verify.best import best_results, check_best
from flce_dist.launch.verify.cases import Case, Shape, Variant
from flce_dist.launch.verify.data import Data, make_data
from flce_dist.launch.verify.results import (
    Results,
    names_of,
    options_of_rank,
    options_of_variant,
    results_of_op,
    results_of_textbook,
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
    oracle, eager = (
        results_of_textbook(data, variant, dtype, metric_gradients) for dtype in dtypes
    )
    truth = Truth(oracle, eager, data.hidden.dtype)
    if not filter_eps:
        return truth
    starts = [vocab_range(len(data.weight), rank, P)[0] for rank in range(P)]
    options = {"dloss": data.dloss, "bias": data.bias, **options_of_variant(variant, data)}
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
    tokens = slice(len(data.labels))
    if case.sequence_parallel:
        tokens = own_tokens(len(data.labels), tp_group)
    rows = slice(*vocab_range(len(data.weight), *rank_and_size(tp_group)))
    if case.variant.best:
        options = options_of_variant(case.variant, data)
        of_rank = options_of_rank(case, rows, tp_group, impl)
        best = best_results(data, tokens, rows, case.variant.best, {**of_rank, **options})
        return {**check_best(best, data, options), **_same_bits(best["lse"], tp_group)}
    results = results_of_op(case, data, tokens, rows, tp_group, impl)
    expected = _expected(case, truth)
    if results.keys() != expected:
        raise ValueError(f"results must be {sorted(expected)}, got {sorted(results)}")
    parts = {"dhidden": tokens, "dweight": rows, "dbias": rows}
    checks = {name: _check(name, x, truth, parts.get(name)) for name, x in results.items()}
    checks |= _same_bits(results["loss" if case.variant.over is None else "logprob"], tp_group)
    if case.filter_eps == 0.0:
        exact = results_of_op(replace(case, filter_eps=None), data, tokens, rows, tp_group, impl)
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
        names -= set(names_of(case)[1:])
    return names


def _same_bits(x: Tensor, tp_group: Group) -> dict[str, ErrorBudget]:
    """Compare bits: how far apart are the ranks' losses?"""
    if tp_group is None:
        return {}
    low, high = (reduced(x.clone(), tp_group, op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
    return {"same loss": ErrorBudget(float((high - low).abs().sum()), 0.0)}


def _check(name: str, actual: Tensor, truth: Truth, part: slice | None) -> ErrorBudget:
    """Return a result's error and budget; of few tokens a miss may be due to their chance.

    ``part`` of a gradient are this rank's tokens or rows; other results are whole.
    """
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
    """The same of these inputs alone."""
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
