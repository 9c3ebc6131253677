"""in_forward may cache exponentials in dweight's memory, which is written last."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flce_dist.op.in_forward import InForward
from tests.parallel_problem import Problem, misses, on_threads
from tests.problems import Upstream, both, check, make_inputs, pairwise, plan_sizes, poisoned_memory
from tests.test_plan import make

sizes = st.integers(1, 60_000)


def in_forward(T: int, V: int, H: int, budget: int | None = None) -> InForward:
    chosen = make(T, V, 2, "in_forward", budget, H=H)
    assert isinstance(chosen, InForward)
    return chosen


@given(sizes, st.integers(1, 300_000), st.integers(8, 16_384), st.integers(1 << 20, 1 << 33))
def test_no_window_is_overwritten_before_it_was_used(T, V, H, budget):
    chosen = in_forward(T, V, H, budget)
    assert chosen.logits_bytes <= max(budget, 256 * V * 2)
    if not chosen.lending:
        return
    row_bytes = 2 * H if chosen.first_t == T else 4 * H
    windows = chosen.lending
    starts = [row * row_bytes for _, row in windows]
    ends = [a + chosen.first_t * w * 2 for a, (w, _) in zip(starts, windows, strict=True)]
    assert ends[-1] <= row_bytes * V
    done = 0
    for i, (columns, row) in enumerate(windows):
        assert columns % 256 == 0 and starts[i] % 16 == 0
        assert i == 0 or starts[i] >= ends[i - 1]
        done += columns
        # Its gradient is written up to here while it and the later windows are still needed.
        assert done <= row
    assert done == sum(columns for columns, _ in chosen.lending) <= chosen.cached_v <= V


def test_the_default_budget_takes_8192_tokens_of_a_large_vocabulary_at_once():
    chosen = in_forward(8192, 128256, 4096)
    assert chosen.lending and len(chosen.chunks()) == 1
    assert chosen.logits_bytes <= 1 << 30 and chosen.cached_v == 128256
    assert len(chosen.lending) == 5


@pytest.fixture
def planned():
    """The schedules of all calls, with windows for a small problem."""
    with plan_sizes(tile=8, min_window=8, most_recomputed=0.35, first_lent=16) as calls:
        yield lambda: [call.schedule for call in calls.values()]


@both
@pytest.mark.parametrize(
    ("columns", "T", "dtype"),  # also with columns computed again; fewer and more tokens than H
    pairwise(itertools.product([150, 96, 72, 48], [23, 70], [torch.float32, torch.bfloat16])),
    ids=str,
)
@poisoned_memory()
def test_gradients_are_right(planned, T, columns, dtype, impl):
    inputs = make_inputs(T, 150, 32, bias=True, dtype=dtype)
    inputs.labels[3] = -100
    inputs.hidden.data[3] = torch.nan
    how = {"schedule": "in_forward", "max_logits_bytes": T * columns * dtype.itemsize - 1}
    for options in ({}, {"label_smoothing": 0.1, "z_loss_weight": 1e-3}):
        check(inputs, Upstream(0.7), impl=impl, **how, **options)
    for chosen in planned():
        assert chosen.lending, "the test shows nothing"
        if columns == 72 and T == 70:
            assert chosen.cached_v < 150, "no column was computed again"
        if columns == 48 and T == 70:
            assert len(chosen.chunks()) > 1, "no chunk besides the one that borrowed"


@both
def test_rows_that_overflow_are_rescued_in_borrowed_windows(planned, impl):
    inputs = make_inputs(70, 150, 32, bias=False)
    # Logits of few bits are exact, whatever the shape of the GEMM that computes them once more.
    for x in (inputs.hidden.data, inputs.weight.data):
        x.copy_((64 * x).round() / 64)
    inputs.hidden.data[::5] *= 400
    check(inputs, Upstream(), impl=impl, schedule="in_forward", max_logits_bytes=70 * 96 * 4)
    assert planned()[0].lending


@both
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_auto_borrows_rather_than_compute_again(planned, reduction, impl):
    inputs = make_inputs(70, 150, 32, bias=True)
    scalar = reduction != "none"
    weights = Upstream(0.7) if scalar else Upstream(torch.linspace(-1, 1, 70, dtype=torch.float64))
    check(inputs, weights, impl=impl, reduction=reduction, max_logits_bytes=70 * 130 * 4)
    (chosen,) = planned()
    assert (chosen.schedule == "in_forward" and bool(chosen.lending)) == scalar
    assert chosen.cached_v == 150 if scalar else 0 < chosen.cached_v < 150


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("schedule", "P", "budget"),
    [("in_forward", 2, 22_000), ("in_forward", 4, 16_000), ("auto", 4, 30_000)],
)
def test_every_rank_borrows_from_its_own_shard(planned, schedule, P, budget, sequence_parallel):
    """Uneven shards: 507 rows over 4 ranks are 126 or 127."""
    problem = Problem(T=64, H=16)
    how = {"schedule": schedule, "max_logits_bytes": budget}
    outcome = on_threads(P, problem, sequence_parallel=sequence_parallel, **how)
    assert misses(outcome, problem) == []
    assert len(planned()) == P and all(chosen.lending for chosen in planned())
