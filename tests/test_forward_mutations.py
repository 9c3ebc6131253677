"""Planted mistakes in forward: each test breaks one thing and expects a comparison to fail.

First wrong results, then mistakes that change the loss or a metric; mistakes that only change
gradients are in test_backward_mutations.py. T tokens, V vocabulary rows, H hidden size.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist.kernels.interface import kernels_of
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss_formulas import LossTerms
from flce_dist.op import prepare, statistics
from flce_dist.op.call import Call
from tests.problems import (
    H,
    Patch,
    T,
    Upstream,
    V,
    both,
    check,
    compare,
    each_schedule,
    inputs,
    make_inputs,
)

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
    """The largest row alone; a rank's share, a window or a chunk would be more."""
    actual = check(inputs(dtype), Upstream())
    gradient = actual[name].reshape(len(actual[name]), -1)
    gradient[gradient.float().norm(dim=1).argmax()] = 0.0
    with pytest.raises(AssertionError, match=f"^{name}: "):
        compare(actual, inputs(dtype), Upstream())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["loss", "lse", "logprob", "entropy", "correct"])
def test_a_metric_that_is_off_by_a_thousandth(name: str, dtype: torch.dtype) -> None:
    """The loss's budget does not depend on the operands' dtype: statistics are fp32."""
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
    mutate(statistics, "shard_logits", break_shard)
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
    terms: Any = Call.loss_terms

    def of_shard(call: Call) -> LossTerms:
        return terms.fget(call)._replace(vocab_size=V // 2)

    monkeypatch.setattr(Call, "loss_terms", property(of_shard))
    with pytest.raises(AssertionError, match="loss: "):
        check(inputs(), impl=impl, label_smoothing=0.1)
