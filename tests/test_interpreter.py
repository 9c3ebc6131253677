"""The interpreter that tests make fast computes what Triton's own does."""

from typing import Any

import pytest

from tests.interpreter import make_fast
from tests.outcomes import assert_same
from tests.problems import DTYPES, SCHEDULES, Upstream, interpreted, metric_upstream, run_op, small

pytestmark = interpreted


@pytest.mark.parametrize(("schedule", "dtype"), zip(SCHEDULES, DTYPES, strict=True), ids=str)
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
