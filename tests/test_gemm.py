"""GEMMs accumulate in fp32: errors do not grow with the number of windows or token chunks."""

from typing import Any

import pytest
import torch

from flce_dist import filtered
from flce_dist.kernels import gemm
from flce_dist.testing import relative_rms
from tests.parallel_problem import TINY, misses, on_threads, plan_sizes
from tests.problems import (
    SCHEDULES,
    H,
    Upstream,
    both,
    each_dtype,
    make_inputs,
    run_op,
    run_reference,
)


@each_dtype
@pytest.mark.parametrize(("gradient", "shape", "schedule", "budget"), [
    ("dweight", (4096, 40, 16), "in_forward", 1),  # 16 chunks
    ("dhidden", (16, 4096, 32), "recompute", 4096 * 16),  # 16 windows
    ("dhidden", (16, 4096, 32), "cached", 4096 * 16),
])  # fmt: skip
def test_errors_do_not_grow_with_chunks_and_windows(gradient, shape, schedule, budget, dtype):
    T, V, hidden_size = shape
    inputs = make_inputs(T, V, hidden_size, dtype)
    truth = run_reference(inputs.to(torch.float64), Upstream())[gradient]

    def error(**options: Any) -> float:
        return relative_rms(run_op(inputs, Upstream(), impl="eager", **options)[gradient], truth)

    whole = [error(schedule=schedule), error(schedule="cached")]
    with plan_sizes(min_window=256, max_window=256):
        assert error(schedule=schedule, max_logits_bytes=budget) <= 1.2 * min(whole) + 1e-7


@pytest.fixture
def empty_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty operands take the path of GEMMs with an fp32 result, which only GPUs have."""
    monkeypatch.setattr(gemm, "_has_fp32_output", lambda x: not x.numel())


@both
@pytest.mark.parametrize(
    "options", [*({"schedule": x} for x in SCHEDULES), {"schedule": filtered.schedule(0.1)}]
)
def test_no_tokens(empty_as_on_a_gpu, impl, options):
    problem = make_inputs(0, 30, H, torch.bfloat16, bias=True)
    options = {"label_smoothing": 0.1, "reduction": "sum", **options}
    results = run_op(problem, Upstream(), impl=impl, **options)
    assert results["dbias"].shape == (30,) and results["dweight"].shape == (30, H)
    assert not any(x.any() for x in results.values())


@pytest.mark.parametrize(
    "options",
    [{"schedule": "recompute"}, {"schedule": "cached"}, {"schedule": filtered.schedule(2.0**-60)}],
)
def test_a_rank_without_rows(empty_as_on_a_gpu, options):
    """The last of four ranks; it would raise before the sum of dhidden, and its peers hang."""
    problem = TINY.changed(dtype=torch.bfloat16, options={"label_smoothing": 0.1})
    assert misses(on_threads(4, problem, **options), problem) == []
