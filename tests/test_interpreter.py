"""The interpreter that tests make fast computes what Triton's own does."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.interpreter import make_fast
from tests.outcomes import assert_same
from tests.problems import DTYPES, SCHEDULES, Upstream, interpreted, metric_upstream, run_op, small

pytestmark = interpreted


@triton.jit
def _load_two(x_ptr, other):
    at = tl.arange(0, 4)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < 2, other=other))


def test_what_a_masked_load_fills_in_is_no_constant(fast_interpreter):
    fast_interpreter.undo()
    make_fast(fast_interpreter)  # and remember nothing
    for other in (0, 5):
        x = torch.ones(4, dtype=torch.int64)
        _load_two[(1,)](x, other)
        assert x.tolist() == [1, 1, other, other]


@pytest.mark.parametrize(("schedule", "dtype"), list(zip(SCHEDULES, DTYPES, strict=True)), ids=str)
def test_same_bits(fast_interpreter, schedule, dtype):
    inputs = small("triton", dtype=dtype, token_weight=True)
    metrics = {} if schedule == "in_forward" else metric_upstream(37, "lse", "entropy")
    options: dict[str, Any] = {"schedule": schedule, "impl": "triton", "logit_scale": 0.7}
    if schedule == "recompute":
        options |= {"softcap": 30.0, "label_smoothing": 0.1}
    fast = run_op(inputs, Upstream(metrics=metrics), **options)
    fast_interpreter.undo()
    try:
        slow = run_op(inputs, Upstream(metrics=metrics), **options)
    finally:
        make_fast(fast_interpreter)
    assert_same(fast, slow)
