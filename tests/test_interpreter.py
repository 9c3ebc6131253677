"""The interpreter that tests make fast computes what Triton's own does."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flce_dist.options import Schedule
from tests.interpreter import make_fast
from tests.problems import (
    Upstream,
    assert_same,
    each_dtype,
    each_schedule,
    interpreted,
    metric_upstream,
    run_op,
    small,
)

pytestmark = interpreted


@each_dtype
@each_schedule
def test_same_bits(
    fast_interpreter: pytest.MonkeyPatch, dtype: torch.dtype, schedule: Schedule
) -> None:
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


@triton.jit
def mix_operands(out_ptr):
    n = tl.arange(0, 4)
    x = n.to(tl.float32)
    tl.static_assert((n + 1).dtype == tl.int32)
    tl.static_assert((n + 1.0).dtype == tl.float32)
    tl.store(out_ptr + n, (3 - x) + (x - 3) + (x + n))
    tl.store(out_ptr + 4 + n, tl.sum((n[:, None] <= n[None, :]).to(tl.float32) + x, axis=1))


def test_operands_of_equal_number_or_shape() -> None:
    out = torch.full((2, 4), torch.nan)
    mix_operands[(1,)](out)
    assert out.tolist() == [[0, 2, 4, 6], [10, 9, 8, 7]]
