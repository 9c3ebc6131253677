"""in_forward may cache exponentials in dweight's memory, which is written last."""

from hypothesis import given
from hypothesis import strategies as st

from flce_dist.op.in_forward import InForward
from tests.problems import Upstream, both, check, make_inputs, plan_sizes
from tests.test_plan import make

sizes = st.integers(1, 60_000)


@given(sizes, st.integers(1, 300_000), st.integers(8, 16_384), st.integers(1 << 20, 1 << 33))
def test_no_window_is_overwritten_before_it_was_used(T, V, H, budget):
    chosen = make(T, V, 2, "in_forward", budget, H=H)
    assert isinstance(chosen, InForward)
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


@both
def test_rows_that_overflow_are_rescued_in_borrowed_windows(impl):
    inputs = make_inputs(70, 150, 32, bias=False)
    # Logits of few bits are exact, whatever the shape of the GEMM that computes them once more.
    for x in (inputs.hidden.data, inputs.weight.data):
        x.copy_((64 * x).round() / 64)
    inputs.hidden.data[::5] *= 400
    how = {"schedule": "in_forward", "max_logits_bytes": 70 * 96 * 4}
    with plan_sizes(tile=8, min_window=8, most_recomputed=0.35, first_lent=16) as planned:
        check(inputs, Upstream(), impl=impl, **how)
        (call,) = planned.values()
    assert isinstance(call.schedule, InForward) and call.schedule.lending
