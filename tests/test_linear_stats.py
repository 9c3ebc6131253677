"""The statistics count the columns of the vocabulary, and no others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist.kernels.interface import kernels_of
from flce_dist.kernels.shard_logits import ShardLogits
from tests.problems import (
    Patch,
    Upstream,
    assert_same,
    both,
    check,
    compare,
    each_schedule,
    inputs,
    poisoned_memory,
    run_op,
    small,
)


@both
@each_schedule
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_columns_that_do_not_exist_are_not_counted(impl, schedule, softcap):
    """Every logit is near -30 or -18, so that one phantom exp(0) would be the whole sum."""
    inputs = small(impl)
    assert inputs.bias is not None
    inputs = replace(inputs, bias=inputs.bias - 30.0)
    check(inputs, Upstream(), impl=impl, schedule=schedule, softcap=softcap, with_metrics=True)


@both
@each_schedule
@poisoned_memory()
def test_padding_rows_of_weight_are_not_counted_and_get_zeros(impl, schedule):
    """They may hold anything: an uninitialised embedding does."""
    inputs = small(impl)
    inputs.labels[inputs.labels >= 130] = 7
    clean = run_op(inputs, Upstream(), impl=impl, schedule=schedule, vocab_size=130)
    weight, bias = inputs.weight.clone(), inputs.bias.clone()  # type: ignore[union-attr]
    weight[130:], bias[130:] = torch.nan, torch.inf
    dirty = run_op(
        replace(inputs, weight=weight, bias=bias),
        Upstream(), impl=impl, schedule=schedule, vocab_size=130, label_smoothing=0.0,
    )  # fmt: skip
    assert_same(clean, dirty)
    assert (clean["dweight"][130:] == 0).all() and (clean["dbias"][130:] == 0).all()
    compare(clean, inputs.to(torch.device("cpu")), Upstream(), vocab_size=130)


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
