"""Would the comparisons of the other tests notice? Each test breaks one thing and expects so.

T tokens, V vocabulary rows, H hidden size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist import autograd, linear_cross_entropy, plan, steps
from flce_dist.kernels import eager, gemm, merge, row_gradient
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.testing import relative_rms
from flce_dist.vocab import VocabShard
from tests.oracle import (
    Inputs,
    Upstream,
    check,
    compare,
    make_inputs,
    metric_upstream,
    per_token_upstream,
    run_op,
    run_reference,
)

T, V, H = 40, 600, 24
RESULTS = ["loss", "dhidden", "dweight", "dbias"]

Patch = Callable[[Any, str, Callable[..., Any]], None]


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Patch:
    """``mutate(owner, name, wrong)`` turns ``owner.name(...)`` into ``wrong(original, ...)``."""

    def patch(owner: Any, name: str, wrong: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: wrong(original, *args, **kwargs))

    return patch


def inputs(dtype: torch.dtype = torch.float32) -> Inputs:
    return make_inputs(T, V, H, dtype, bias=True, token_weight=True)


# --- results that are off: named, one by one


@pytest.mark.parametrize("factor", [0.0, 1.01, -1.0, torch.nan])
@pytest.mark.parametrize("name", RESULTS)
def test_a_scaled_result(name: str, factor: float) -> None:
    actual = check(inputs(), Upstream())
    actual[name] = actual[name] * factor
    with pytest.raises(AssertionError, match=f"^{name}: "):
        compare(actual, inputs(), Upstream())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RESULTS[1:])
def test_a_scaled_gradient_in_half_precision(name: str, dtype: torch.dtype) -> None:
    for factor in (0.0, 1.05):
        actual = check(inputs(dtype), Upstream())
        actual[name] = actual[name] * factor
        with pytest.raises(AssertionError, match=f"^{name}: "):
            compare(actual, inputs(dtype), Upstream())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RESULTS[1:])
def test_one_row_of_a_gradient_that_is_missing(name: str, dtype: torch.dtype) -> None:
    """The largest row: a share of one rank, a window or a chunk would be more."""
    actual = check(inputs(dtype), Upstream())
    gradient = actual[name].reshape(len(actual[name]), -1)
    gradient[gradient.float().norm(dim=1).argmax()] = 0.0
    with pytest.raises(AssertionError, match=f"^{name}: "):
        compare(actual, inputs(dtype), Upstream())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["loss", "lse", "logprob", "entropy", "correct"])
def test_a_metric_that_is_off_by_a_thousandth(name: str, dtype: torch.dtype) -> None:
    """Half precision of the operands does not make room for it: statistics are fp32."""
    actual = check(inputs(dtype), Upstream(), with_metrics=True)
    actual[name] = ~actual[name] if name == "correct" else actual[name] * 1.001
    with pytest.raises(AssertionError, match=f"^{name}: "):
        compare(actual, inputs(dtype), Upstream())


# --- steps that are broken


def break_shard(original: Any, *args: Any, **kwargs: Any) -> ShardLogits:
    logits = original(*args, **kwargs)
    return replace(logits, vocab_start_index=logits.vocab_start_index + 1)


@pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
def test_vocabulary_shifted_by_one(mutate: Patch, schedule: str) -> None:
    check(inputs(), schedule=schedule)
    mutate(steps.Call, "logits", break_shard)
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs(), schedule=schedule)


def test_labels_owned_by_every_rank(mutate: Patch) -> None:
    """As if two ranks added the label's logit."""
    mutate(eager, "label_logit", lambda original, logits: 2 * original(logits))
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs())


def test_padding_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_inputs(T, V, H, ignored=0.0)
    problem.labels[problem.labels >= V - 1] = 0
    check(problem, vocab_size=V - 1)
    monkeypatch.setattr(VocabShard, "V", property(lambda shard: shard.end - shard.start))
    with pytest.raises(AssertionError, match="loss: "):
        check(problem, vocab_size=V - 1)


def test_smoothing_averaged_over_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    check(inputs(), label_smoothing=0.1)
    terms = steps.Call.loss_terms.fget  # type: ignore[attr-defined]

    def of_shard(call: steps.Call) -> dict[str, Any]:
        return {**terms(call), "vocab_size": V // 2}

    monkeypatch.setattr(steps.Call, "loss_terms", property(of_shard))
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs(), label_smoothing=0.1)


@pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
def test_rescue_switched_off(mutate: Patch, schedule: str) -> None:
    z = torch.randn(8, 70)
    labels = torch.arange(8)
    z[F.one_hot((labels + 1) % 70, 70).bool()] = 200.0
    problem = Inputs(torch.eye(8), z.T.contiguous(), labels)
    check(problem, schedule=schedule)
    mutate(merge, "pick_reference", lambda original, label_logit, others_max: label_logit)
    with pytest.raises(AssertionError, match="loss: "):
        check(problem, schedule=schedule)


def test_rescue_forgets_the_cache(mutate: Patch) -> None:
    """The loss is right then, and only the gradients tell."""
    z = torch.randn(8, 70)
    labels = torch.arange(8)
    z[F.one_hot((labels + 1) % 70, 70).bool()] = 60.0
    problem = Inputs(torch.eye(8), z.T.contiguous(), labels)
    mutate(eager, "rescue", lambda original, *args, **kw: original(*args, **{**kw, "cache": None}))
    with pytest.raises(AssertionError, match="dhidden: "):
        check(problem, schedule="cached")


@pytest.mark.parametrize("schedule", ["recompute", "cached"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_upstream_gradient_ignored(mutate: Patch, reduction: str, schedule: str) -> None:
    def ignore(original: Any, dloss: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(torch.ones_like(dloss), *args, **kwargs)

    g = per_token_upstream(T) if reduction == "none" else 3.0
    problem = make_inputs(T, V, H, ignored=0.0)
    check(problem, Upstream(g), reduction=reduction, schedule=schedule)
    mutate(row_gradient, "row_gradient", ignore)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(problem, Upstream(g), reduction=reduction, schedule=schedule)


def test_upstream_gradient_ignored_by_in_forward(mutate: Patch) -> None:
    def ignore(original: Any, ctx: Any, dloss: Tensor, *dmetrics: Tensor) -> Any:
        return original(ctx, torch.ones_like(dloss), *dmetrics)

    mutate(autograd.InForwardFunction, "backward", ignore)
    check(inputs(), Upstream(1.0), schedule="in_forward")
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), Upstream(3.0), schedule="in_forward")


def test_token_weights_ignored(mutate: Patch) -> None:
    mutate(steps, "token_weights", lambda original, logits, token_weight: original(logits, None))
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs())


def test_mean_over_ignored_tokens_too(mutate: Patch) -> None:
    mutate(steps, "loss_norm", lambda original, weights, reduction: torch.tensor(float(T)))
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs(), reduction="mean")


def test_softcap_without_its_derivative(mutate: Patch) -> None:
    for owner in (eager, row_gradient):
        mutate(owner, "softcap_grad", lambda original, z, softcap: 1.0)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), softcap=3.0, schedule="recompute")


@pytest.mark.parametrize("option", ["label_smoothing", "z_loss_weight"])
def test_an_option_that_backward_forgets(mutate: Patch, option: str) -> None:
    options: dict[str, Any] = {option: 0.05}

    def forget(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, option: 0.0})

    mutate(row_gradient, "row_gradient", forget)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), schedule="recompute", **options)


def test_the_labels_column_left_out(mutate: Patch) -> None:
    mutate(row_gradient, "label_value", lambda original, *args, **kw: 0 * original(*args, **kw))
    for schedule in ("recompute", "cached", "in_forward"):
        with pytest.raises(AssertionError, match="dhidden: "):
            check(inputs(), schedule=schedule)


@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_a_window_that_is_never_added(
    mutate: Patch, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setattr(plan, "_MIN_WINDOW", 256)
    monkeypatch.setattr(plan, "_MAX_WINDOW", 256)
    options: dict[str, Any] = {"schedule": schedule, "max_logits_bytes": T * 4 * 520}
    check(inputs(), **options)

    def skip_the_second(original: Any, acc: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> None:
        seen.append(b)
        if len(seen) != 2:
            original(acc, a, b, **kwargs)

    seen: list[Tensor] = []
    mutate(gemm, "add_matmul", skip_the_second)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), **options)
    assert len(seen) == 3


def test_a_chunk_that_is_never_added(mutate: Patch) -> None:
    problem = make_inputs(600, 40, H, bias=True)
    options: dict[str, Any] = {"schedule": "in_forward", "max_logits_bytes": 1}
    check(problem, **options)

    def skip_the_last(original: Any, *args: Any) -> None:
        if args[-1].start != 512:
            original(*args)
        else:
            args[-2][args[-1]] = 0.0

    mutate(autograd, "_add_chunk", skip_the_last)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(problem, **options)


def test_accumulation_in_half_precision(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of dhidden grows with the windows; test_cases.py allows a factor of 1.2."""
    problem = make_inputs(16, 4096, H, torch.bfloat16)
    truth = run_reference(problem.to(torch.float64), Upstream())["dhidden"]

    def round_each(original: Any, acc: Tensor, *args: Any, **kwargs: Any) -> None:
        original(acc, *args, **kwargs)
        acc.copy_(acc.bfloat16())

    mutate(gemm, "add_matmul", round_each)
    errors = []
    for window in (4096, 256):
        monkeypatch.setattr(plan, "_MIN_WINDOW", window)
        monkeypatch.setattr(plan, "_MAX_WINDOW", window)
        results = run_op(problem, Upstream(), impl="eager", schedule="recompute")
        errors.append(relative_rms(results["dhidden"], truth))
    assert errors[1] > 1.2 * errors[0]


def test_dbias_without_the_tokens_scales(mutate: Patch) -> None:
    def unscaled(original: Any, d: Tensor, rows: Any) -> Tensor:
        return original(d, rows._replace(scale=torch.ones_like(rows.scale)))

    mutate(steps, "dbias_piece", unscaled)
    with pytest.raises(AssertionError, match="dbias: "):
        check(inputs())


@pytest.mark.parametrize("name", ["lse", "logprob", "entropy"])
def test_a_metrics_gradient_that_is_dropped(mutate: Patch, name: str) -> None:
    def drop(original: Any, dloss: Tensor, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        return original(dloss, metrics._replace(**{name: None}), *args, **kwargs)

    upstream = Upstream(0.1, metric_upstream(T, "lse", "logprob", "entropy"))
    check(inputs(), upstream)
    mutate(row_gradient, "row_gradient_with_metrics", drop)
    with pytest.raises(AssertionError, match="dhidden: "):
        check(inputs(), upstream)


def test_exponentials_of_rounded_logits(mutate: Patch) -> None:
    """Caching z in bf16 instead of exp(z): off by up to 6 % where z is near 20."""
    problem = make_inputs(T, V, H, torch.bfloat16, spread=6.0)
    check(problem, schedule="cached")
    mutate(gemm, "project", lambda original, *args: original(*args).bfloat16().float())
    with pytest.raises(AssertionError, match="loss: "):
        check(problem, schedule="cached")


def test_a_phantom_column(mutate: Patch) -> None:
    """One exp(0) more in the sum, where every logit is near -20."""
    problem = inputs()
    assert problem.bias is not None
    problem = replace(problem, bias=problem.bias - 20.0)
    check(problem)

    def one_more(original: Any, logits: ShardLogits, label_logit: Tensor, **kwargs: Any) -> Any:
        others_max, sums = original(logits, label_logit, **kwargs)
        sums[0] += (-label_logit).exp()
        return others_max, sums

    mutate(eager, "linear_stats", one_more)
    with pytest.raises(AssertionError, match="loss: "):
        check(problem)


def test_a_cache_that_backward_changes(mutate: Patch) -> None:
    """A first backward might be right; the second one says so."""

    def in_place(original: Any, dlogits: Any, *args: Any) -> Tensor:
        return original(dlogits, *args).mul_(1.0)

    hidden, weight = torch.randn(T, H, requires_grad=True), torch.randn(V, H)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(T).long(), schedule="cached")
    mutate(steps.Dlogits, "piece", in_place)
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, hidden)
