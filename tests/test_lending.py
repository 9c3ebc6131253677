"""in_forward may keep exponentials in the memory that dweight is written to later."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flce_dist import plan as planning
from flce_dist.plan import Plan, plan
from tests.oracle import Upstream, check, make_inputs
from tests.problems import both, poisoned_memory

sizes = st.integers(1, 60_000)


def in_forward(T: int, V: int, H: int, budget: int | None = None, itemsize: int = 2) -> Plan:
    return plan(
        T=T,
        V=V,
        itemsize=itemsize,
        schedule="in_forward",
        max_logits_bytes=budget,
        dweight_row_bytes=H * itemsize,
    )


@given(sizes, st.integers(1, 300_000), st.integers(8, 16_384), st.integers(1 << 20, 1 << 33))
def test_no_window_is_overwritten_before_it_was_used(T, V, H, budget):
    chosen = in_forward(T, V, H, budget)
    assert chosen.logits_bytes <= max(budget, 256 * V * 2)
    if chosen.lending is None:
        return
    assert chosen.chunks() == [(0, T)]
    step, bytes_each = chosen.lending.window_v, T * chosen.lending.window_v * 2
    firsts = chosen.lending.rows(V)
    spans = [(2 * H * row, 2 * H * row + bytes_each) for row in firsts]
    assert firsts and spans[-1][1] <= 2 * H * V
    assert len(firsts) * step <= chosen.cached_v <= V
    for i, (start, end) in enumerate(spans):
        assert start % 16 == 0
        assert i == 0 or start >= spans[i - 1][1]
        # The gradient of window i is written while window i and the later ones are still needed.
        assert (i + 1) * step * 2 * H <= start < end


def test_a_chunk_that_fits_borrows_nothing():
    assert in_forward(8192, 16032, 4096).lending is None


def test_the_default_budget_takes_8192_tokens_of_a_large_vocabulary_at_once():
    chosen = in_forward(8192, 128256, 4096)
    assert chosen.lending is not None and len(chosen.chunks()) == 1
    assert chosen.logits_bytes <= 1 << 30


def test_without_dweight_there_is_nothing_to_borrow():
    chosen = plan(T=8192, V=128256, itemsize=2, schedule="in_forward", max_logits_bytes=None)
    assert chosen.lending is None and len(chosen.chunks()) > 1


@pytest.fixture
def small_windows(monkeypatch):
    """Windows of a small problem's size; yields the plans that were made."""
    monkeypatch.setattr(planning, "_WAVE", 16)
    monkeypatch.setattr(planning, "_TILE", 8)
    monkeypatch.setattr(planning, "_MIN_WINDOW", 8)
    monkeypatch.setattr(planning, "_MOST_RECOMPUTED", 0.5)
    made: list[Plan] = []

    def noting(**kwargs):
        made.append(plan(**kwargs))
        return made[-1]

    monkeypatch.setattr("flce_dist.prepare.plan", noting)
    return made


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [23, 70])  # fewer and more tokens than H
@pytest.mark.parametrize("columns", [150, 96, 72])  # enough, and with columns computed again
@poisoned_memory()
def test_gradients_are_right(small_windows, T, columns, dtype, impl):
    inputs = make_inputs(T, 150, 32, bias=True, dtype=dtype)
    inputs.labels[3] = -100
    inputs.hidden.data[3] = torch.nan
    itemsize = dtype.itemsize
    for options in ({}, {"label_smoothing": 0.1, "z_loss_weight": 1e-3}):
        check(
            inputs,
            Upstream(0.7),
            impl=impl,
            schedule="in_forward",
            max_logits_bytes=T * columns * itemsize - 1,
            **options,
        )
    lent = [chosen for chosen in small_windows if chosen.lending is not None]
    assert lent, "no plan borrowed: the test shows nothing"
    if columns == 72 and T == 70:
        assert lent[0].cached_v < 150, "no column was computed again"


@both
def test_rows_that_overflow_are_rescued_in_borrowed_windows(small_windows, impl):
    inputs = make_inputs(70, 150, 32, bias=False)
    inputs.hidden.data[5] *= 400
    check(inputs, Upstream(), impl=impl, schedule="in_forward", max_logits_bytes=70 * 96 * 4)
    assert small_windows[0].lending is not None


def test_windows_in_the_wrong_order_would_show(small_windows, monkeypatch):
    """Taken from the last to the first, a window is overwritten before it was used."""
    from flce_dist.steps import Dlogits

    pieces = Dlogits.pieces
    monkeypatch.setattr(Dlogits, "pieces", lambda self: pieces(self)[::-1])
    inputs = make_inputs(70, 150, 32, bias=False)
    with pytest.raises(AssertionError):
        check(inputs, Upstream(), impl="eager", schedule="in_forward", max_logits_bytes=70 * 96 * 4)
