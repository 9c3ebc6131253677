"""Would the comparisons of the other tests notice? Each test breaks one thing and expects so.

First results that are off, then mistakes that the loss or a metric shows; those that only gradients
show are in test_mutations_gradients.py. T tokens, V vocabulary rows, H hidden size.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist.kernels import eager, eager_rows, gemm
from flce_dist.kernels import rescue as rescue_file
from flce_dist.kernels import token_loss as token_loss_file
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss_formulas import LossTerms
from flce_dist.op import forward, prepare
from flce_dist.op.prepare import Call, kernels_of
from tests.mutations import H, Patch, T, V, inputs, label_below
from tests.oracle import Upstream, check, compare, make_inputs
from tests.problems import both, each_schedule

RESULTS = ["loss", "dhidden", "dweight", "dbias"]

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
    """Half precision of the operands is no excuse: statistics are fp32."""
    actual = check(inputs(dtype), Upstream(), with_metrics=True)
    actual[name] = ~actual[name] if name == "correct" else actual[name] * 1.001
    with pytest.raises(AssertionError, match=f"^{name}: "):
        compare(actual, inputs(dtype), Upstream())


# --- steps that are broken


def break_shard(original: Any, *args: Any, **kwargs: Any) -> ShardLogits:
    logits = original(*args, **kwargs)
    return replace(logits, vocab_start_index=logits.vocab_start_index + 1)


@each_schedule
def test_vocabulary_shifted_by_one(mutate: Patch, schedule: str) -> None:
    check(inputs(), schedule=schedule)
    mutate(forward, "shard_logits", break_shard)
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs(), schedule=schedule)


@both
def test_labels_owned_by_every_rank(mutate: Patch, impl: str) -> None:
    """As if two ranks added the label's logit."""

    def twice(original: Any, *args: Any, out: Tensor, **kwargs: Any) -> None:
        original(*args, out=out, **kwargs)
        out *= 2

    mutate(kernels_of(impl), "label_logit", twice)
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs(), impl=impl)


def test_padding_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_inputs(T, V, H, ignored=0.0)
    problem.labels[problem.labels >= V - 1] = 0
    check(problem, vocab_size=V - 1)
    monkeypatch.setattr(prepare, "real_rows", lambda rows, vocab_size: rows[1] - rows[0])
    with pytest.raises(AssertionError, match="loss: "):
        check(problem, vocab_size=V - 1)


@both
def test_smoothing_averaged_over_a_shard(monkeypatch: pytest.MonkeyPatch, impl: str) -> None:
    check(inputs(), impl=impl, label_smoothing=0.1)
    terms = forward.loss_terms

    def of_shard(call: Call) -> LossTerms:
        return terms(call)._replace(vocab_size=V // 2)

    monkeypatch.setattr(forward, "loss_terms", of_shard)
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs(), impl=impl, label_smoothing=0.1)


@both
@each_schedule
def test_rescue_switched_off(
    mutate: Patch, monkeypatch: pytest.MonkeyPatch, schedule: str, impl: str
) -> None:
    problem = label_below(200.0)
    check(problem, impl=impl, schedule=schedule)
    for owner in (eager, eager_rows):
        mutate(owner, "pick_reference", lambda original, label_logit, others_max: label_logit)
    for owner in (rescue_file, token_loss_file):
        monkeypatch.setattr(owner, "RESCUE_ABOVE", 1e9)
    with pytest.raises(AssertionError, match="loss: "):
        check(problem, impl=impl, schedule=schedule)


@both
@pytest.mark.parametrize("nats", [60.0, 200.0])
def test_rescue_forgets_the_sums(mutate: Patch, nats: float, impl: str) -> None:
    def forget(
        original: Any, logits: Any, label_logit: Tensor, others_max: Tensor, sums: Tensor, **kw: Any
    ) -> Tensor:
        before = sums.clone()
        return before[: len(original(logits, label_logit, others_max, sums, **kw))]

    mutate(kernels_of(impl), "rescue", forget)
    with pytest.raises(AssertionError, match="loss: "):
        check(label_below(nats), impl=impl)


@both
def test_rescue_forgets_the_entropy(mutate: Patch, impl: str) -> None:
    first_row = {"eager": 1, "triton": 2}[impl]

    def forget(original: Any, *args: Any, **kw: Any) -> Tensor:
        before = args[-1].clone()
        sums = original(*args, **kw)
        sums[first_row:] = before[first_row : len(sums)]
        return sums

    check(label_below(60.0), impl=impl, with_metrics=True)
    mutate(kernels_of(impl), "rescue", forget)
    with pytest.raises(AssertionError, match="entropy: "):
        check(label_below(60.0), impl=impl, with_metrics=True)


@both
@each_schedule
def test_token_weights_ignored(mutate: Patch, schedule: str, impl: str) -> None:
    def ignore(original: Any, labels: Tensor, token_weight: Tensor, *args: Any, **kw: Any) -> Any:
        return original(labels, None, *args, **kw)

    mutate(kernels_of(impl), "token_loss", ignore)
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs(), impl=impl, schedule=schedule)


@both
@each_schedule
@pytest.mark.parametrize("forgotten", ["ignored tokens", "weights"])
def test_a_mean_over_the_wrong_weights(
    mutate: Patch, forgotten: str, schedule: str, impl: str
) -> None:
    def wrong(
        original: Any, labels: Tensor, weight: Tensor, ignore_index: int, dtype: torch.dtype
    ) -> Tensor:
        if forgotten == "weights":
            return original(labels, None, ignore_index, dtype)
        return original(labels, weight, -1, dtype)

    options: dict[str, Any] = {"impl": impl, "reduction": "mean", "schedule": schedule}
    check(inputs(), **options)
    mutate(kernels_of(impl), "loss_norm", wrong)
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs(), **options)


def test_exponentials_of_rounded_logits(mutate: Patch) -> None:
    """Caching z in bf16 instead of exp(z): off by up to 6 % where z is near 20."""
    problem = make_inputs(T, V, H, torch.bfloat16, spread=6.0)
    check(problem, schedule="cached")
    mutate(gemm, "project", lambda original, *args: original(*args).bfloat16().float())
    with pytest.raises(AssertionError, match="loss: "):
        check(problem, schedule="cached")


@both
def test_a_phantom_column(mutate: Patch, impl: str) -> None:
    """One exp(0) more in the sum, where every logit is near -20."""
    problem = inputs()
    assert problem.bias is not None
    problem = replace(problem, bias=problem.bias - 20.0)
    check(problem, impl=impl)

    def one_more(
        original: Any, logits: ShardLogits, label_logit: Tensor, *, sums: Tensor, **kwargs: Any
    ) -> None:
        original(logits, label_logit, sums=sums, **kwargs)
        sums[0] += (-label_logit).exp()

    mutate(kernels_of(impl), "linear_stats", one_more)
    with pytest.raises(AssertionError, match="loss: "):
        check(problem, impl=impl)
