"""The statistics count the columns of the vocabulary, and no others."""

from dataclasses import replace

import pytest
import torch

from tests.problems import (
    Upstream,
    assert_same,
    both,
    check,
    compare,
    each_schedule,
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
