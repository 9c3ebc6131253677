"""Planted mistakes in backward: each test breaks one thing and expects a comparison to fail.

Mistakes that change the loss are in test_forward_mutations.py. T tokens, V vocabulary rows, H
hidden size.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import linear_cross_entropy
from flce_dist.kernels import eager, eager_logits
from flce_dist.kernels import token_gradient_formulas as row_gradient
from flce_dist.kernels.interface import kernels_of
from flce_dist.kernels.token_loss_formulas import LossTerms, TokenStats
from flce_dist.op import autograd, gradients, plan
from flce_dist.op.call import Call
from tests.problems import (
    H,
    Patch,
    T,
    Upstream,
    V,
    both,
    check,
    each_schedule,
    inputs,
    make_inputs,
    metric_upstream,
    per_token_upstream,
)


def without(name: str) -> Callable[..., Any]:
    """A ``row_gradient`` that omits one factor of the gradient."""

    def wrong(
        original: Any, stats: TokenStats, labels: Tensor, token_weight: Tensor | None,
        norm: Tensor | None, dloss: Tensor | None, terms: LossTerms, **kw: Any,
    ) -> Any:  # fmt: skip
        given = {"token_weight": token_weight, "norm": norm, "dloss": dloss}
        assert given[name] is not None
        given[name] = None
        return original(stats, labels, *given.values(), terms, **kw)

    return wrong


@both
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_upstream_gradient_ignored(mutate: Patch, reduction: str, schedule: str, impl: str) -> None:
    g = per_token_upstream(T) if reduction == "none" else 3.0
    problem = make_inputs(T, V, H, ignored=0.0)
    options: dict[str, Any] = {"impl": impl, "reduction": reduction, "schedule": schedule}
    check(problem, Upstream(g), **options)
    mutate(kernels_of(impl), "row_gradient", without("dloss"))
    with pytest.raises(AssertionError, match="dhidden: "):
        check(problem, Upstream(g), **options)


@both
@pytest.mark.parametrize("name", ["norm", "token_weight"])
@each_schedule
def test_norm_or_weights_ignored_by_the_gradients(
    mutate: Patch, schedule: str, name: str, impl: str
) -> None:
    check(inputs(), impl=impl, schedule=schedule)
    mutate(kernels_of(impl), "row_gradient", without(name))
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), impl=impl, schedule=schedule)


@both
@each_schedule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norm_not_kept_for_the_gradients(
    mutate: Patch, dtype: torch.dtype, schedule: str, impl: str
) -> None:
    """The loss is right. in_forward divides its gradients at once, but in fp16 in backward."""
    norms: list[Tensor] = []

    def forget(original: Any, *args: Any) -> Tensor:
        norms.append(original(*args))
        return torch.ones_like(norms[-1])

    check(inputs(dtype), impl=impl, schedule=schedule)
    mutate(kernels_of(impl), "loss_norm", forget)
    mutate(
        kernels_of(impl),
        "reduce_loss",
        lambda original, loss, norm: original(loss, norms[-1]),
    )
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(dtype), impl=impl, schedule=schedule)


@both
def test_norm_that_divides_twice(mutate: Patch, impl: str) -> None:
    """Removed from forward and from backward; which one matters depends on the dtype."""

    def divide_too(
        original: Any, stats: TokenStats, labels: Tensor, token_weight: Tensor, norm: Any,
        *args: Any, **kw: Any,
    ) -> Any:  # fmt: skip
        assert norm is None
        norm = token_weight.float().where(labels != -100, 0.0).sum()
        return original(stats, labels, token_weight, norm, *args, **kw)

    problem = inputs(torch.float16)
    check(problem, impl=impl, schedule="in_forward")
    mutate(kernels_of(impl), "row_gradient", divide_too)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(problem, impl=impl, schedule="in_forward")


def test_upstream_gradient_ignored_by_in_forward(mutate: Patch) -> None:
    def ignore(original: Any, ctx: Any, dloss: Tensor, *dmetrics: Tensor) -> Any:
        return original(ctx, torch.ones_like(dloss), *dmetrics)

    mutate(autograd.LinearCrossEntropyFunction, "backward", ignore)
    check(inputs(), Upstream(1.0), schedule="in_forward")
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), Upstream(3.0), schedule="in_forward")


@both
def test_gradients_of_in_forward_left_unscaled(mutate: Patch, impl: str) -> None:
    """Right where the upstream gradient is 1, wrong for any other."""

    def copy(original: Any, x: Tensor, factor: Tensor, *, out: Tensor) -> None:
        out.copy_(x)

    mutate(kernels_of(impl), "scale", copy)
    check(inputs(), Upstream(1.0), impl=impl, schedule="in_forward")
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), Upstream(3.0), impl=impl, schedule="in_forward")


def test_softcap_without_its_derivative(mutate: Patch) -> None:
    for owner in (eager, eager_logits, row_gradient):
        mutate(owner, "softcap_grad", lambda original, z, softcap: 1.0)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), softcap=3.0, schedule="recompute")


@both
@pytest.mark.parametrize("option", ["label_smoothing", "z_loss_weight"])
def test_an_option_that_backward_forgets(mutate: Patch, option: str, impl: str) -> None:
    options: dict[str, Any] = {option: 0.05, "impl": impl, "schedule": "recompute"}

    def forget(original: Any, *args: Any, **kwargs: Any) -> Any:
        *others, terms = args
        return original(*others, terms._replace(**{option: 0.0}), **kwargs)

    check(inputs(), **options)
    mutate(kernels_of(impl), "row_gradient", forget)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), **options)


@both
def test_the_labels_column_left_out(mutate: Patch, impl: str) -> None:
    def forget(original: Any, *args: Any, **kw: Any) -> Any:
        rows = original(*args, **kw)
        return rows._replace(label_value=torch.zeros_like(rows.label_value))

    mutate(kernels_of(impl), "row_gradient", forget)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), impl=impl, schedule="recompute")


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("schedule", ["cached", "in_forward"])
def test_the_labels_column_not_written_into_the_cache(
    mutate: Patch, schedule: str, dtype: torch.dtype, impl: str
) -> None:
    """fp16 caches in bf16, and writes the label's column when it converts."""
    mutate(kernels_of(impl), "write_label_value", lambda original, *args, **kw: None)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(dtype), impl=impl, schedule=schedule)


@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_a_window_that_is_never_added(
    mutate: Patch, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setattr(plan, "_MIN_WINDOW", 256)
    monkeypatch.setattr(plan, "_MAX_WINDOW", 256)
    options: dict[str, Any] = {"schedule": schedule, "max_logits_bytes": T * 4 * 520}
    check(inputs(), **options)

    def skip_the_second(original: Any, gradients: Any, *window: Any) -> None:
        seen.append(window)
        if len(seen) != 2:
            original(gradients, *window)

    seen: list[Any] = []
    mutate(gradients.Gradients, "_add_dhidden", skip_the_second)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), **options)
    assert len(seen) == 3


def test_a_chunk_that_is_never_added(mutate: Patch) -> None:
    problem = make_inputs(600, 40, H, bias=True)
    options: dict[str, Any] = {"schedule": "in_forward", "max_logits_bytes": 1}
    check(problem, **options)

    def skip_the_last(original: Any, gradients: Any, chunk: Any) -> None:
        if chunk.tokens[0] != 512:
            original(gradients, chunk)
        else:
            gradients.dhidden.tokens[slice(*chunk.tokens)] = 0.0

    mutate(gradients.Gradients, "add", skip_the_last)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(problem, **options)


def test_dbias_without_the_tokens_scales(mutate: Patch) -> None:
    def unscaled(original: Any, call: Call, d: Tensor, rows: Any) -> Tensor:
        return original(call, d, rows._replace(scale=torch.ones_like(rows.scale)))

    mutate(gradients, "dbias_of", unscaled)
    with pytest.raises(AssertionError, match="dbias: "):
        check(inputs())


@pytest.mark.parametrize("name", ["lse", "logprob", "entropy"])
def test_a_metrics_gradient_that_is_dropped(mutate: Patch, name: str) -> None:
    def drop(original: Any, stats: TokenStats, dloss: Tensor, metrics: Any, *args: Any) -> Any:
        return original(stats, dloss, metrics._replace(**{name: None}), *args)

    upstream = Upstream(0.1, metric_upstream(T, "lse", "logprob", "entropy"))
    check(inputs(), upstream)
    mutate(row_gradient, "row_gradient_with_metrics", drop)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), upstream)


def test_a_cache_that_backward_changes(mutate: Patch) -> None:
    """The first backward may be right; the second one is not."""

    def in_place(original: Any, *args: Any) -> Any:
        for start, end, d in original(*args):
            yield start, end, d.mul_(1.0)

    hidden, weight = torch.randn(T, H, requires_grad=True), torch.randn(V, H)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(T).long(), schedule="cached")
    mutate(gradients, "dlogits", in_place)
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, hidden)
