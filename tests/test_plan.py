"""The plan keeps its promises for any sizes and budget."""

import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flce_dist.arguments.options import ScheduleName
from flce_dist.parallel.vocab import real_rows, vocab_range
from flce_dist.schedules.choose import choose_schedule
from flce_dist.schedules.fit import Plan, Shape, widest_window
from flce_dist.schedules.in_forward import InForward
from tests.parallel_problem import chunks_of, plan_sizes
from tests.problems import Upstream, both, check, make_inputs

GIB = 1 << 30
SMALLEST = 256  # columns or tokens of the smallest piece
MANY = 16384  # tokens up to which auto, given no budget, computes nothing again
WAVE = 8448  # columns whose GEMMs fill the last wave of an H200

sizes = st.one_of(st.integers(0, 600), st.integers(0, 200_000))
rows = st.one_of(st.integers(1, 600), st.integers(1, 300_000))
budgets = st.one_of(st.none(), st.integers(1, 1 << 20), st.integers(1, 1 << 40))
schedules = st.sampled_from(["auto", "recompute", "cached", "in_forward"])
itemsizes = st.sampled_from([2, 4, 8])
hidden_sizes = st.one_of(st.just(0), st.integers(1, 20_000))  # 0: there is no dweight to lend


def make(
    T: int = 8192, V: int = 128256, itemsize: int = 2, schedule: ScheduleName = "auto",
    max_logits_bytes: int | None = None, *, H: int = 0, **facts: Any,
) -> Plan:  # fmt: skip
    """A plan; with ``H`` > 0 dweight [V, H] may lend its memory."""
    return choose_schedule(
        T=T, V=V, itemsize=itemsize, schedule=schedule, max_logits_bytes=max_logits_bytes,
        dweight_row_bytes=(H * itemsize, H * max(4, itemsize)), **facts,
    )  # fmt: skip


def lending_of(chosen: Plan) -> tuple[tuple[int, int], ...]:
    return chosen.lending if isinstance(chosen, InForward) else ()


def held_bytes(chosen: Plan, itemsize: int, converts: bool) -> int:
    window = min(chosen.window_v, chosen.V if converts else chosen.V - chosen.cached_v)
    lent = sum(columns for columns, _ in lending_of(chosen))
    (start, end), *later = chunks_of(chosen)
    first = (end - start) * (chosen.cached_v - lent + window)
    return max([first, *((end - start) * chosen.V for start, end in later)]) * itemsize


def most_of_auto(T: int, V: int) -> int:
    """The most that ``auto`` holds without a budget: half of the fp32 logits of MANY tokens."""
    return max(GIB, 2 * V * min(T, MANY))


@given(sizes, rows, itemsizes, schedules, budgets, hidden_sizes, st.booleans())
@example(8192, 128_256, 2, "in_forward", GIB, 0, True)
@example(8192, 128_256, 2, "cached", 2 * 8192 * 128_256, 0, True)
@example(4855, 96_512, 4, "auto", None, 0, True)
def test_the_budget_is_held(T, V, itemsize, schedule, budget, H, converts):
    """Also if a window of the cache is converted, which then has memory of its own."""
    chosen = make(T, V, itemsize, schedule, budget, H=H, converts=converts)
    window = chosen.window_v if converts else 0
    pieces = 2 if converts and schedule not in ("recompute", "in_forward") else 1
    smallest = SMALLEST * itemsize * (V + window if schedule == "in_forward" else T * pieces)
    asked = budget
    if budget is None and schedule in ("auto", "in_forward"):
        widest = widest_window(Shape(T, V, itemsize, converts, 0, 0)) if converts else 0
        asked = most_of_auto(T, V + widest)
    assert held_bytes(chosen, itemsize, converts) <= chosen.logits_bytes
    if asked is not None:
        assert chosen.logits_bytes <= max(asked, smallest)


@given(sizes, rows, itemsizes, schedules, budgets, hidden_sizes)
@example(9000, 128_256, 2, "in_forward", GIB, 0)
def test_chunks_cover_the_tokens_once(T, V, itemsize, schedule, budget, H):
    chosen = make(T, V, itemsize, schedule, budget, H=H)
    chunks = chunks_of(chosen)
    assert chunks[0][0] == 0
    assert chunks[-1][1] == T
    for (_, end), (start, _) in itertools.pairwise(chunks):
        assert end == start
    if T:
        assert all(start < end for start, end in chunks)
        lengths = [end - start for start, end in chunks]
        assert all(length % SMALLEST == 0 for length in lengths[:-1])
    if isinstance(chosen, InForward) and T:
        assert lengths[0] == chosen.first_t
        assert all(length == chosen.chunk_t for length in lengths[1:-1])
        assert lengths[-1] <= max(chosen.first_t, chosen.chunk_t)
        if not chosen.lending:  # no remainder that is too small to fill a GPU
            assert max(lengths) - min(lengths) <= SMALLEST * len(lengths)
    if schedule != "in_forward":
        assert len(chunks) == 1


@given(sizes, rows, itemsizes, schedules, budgets, hidden_sizes, st.integers(1, 8))
def test_cached_columns_and_windows_cover_every_shard(T, V_all, itemsize, schedule, budget, H, P):
    """V of the plan is the largest shard's; the others apply the same plan to fewer rows."""
    largest = -(-V_all // P)
    chosen = make(T, largest, itemsize, schedule, budget, H=H)
    assert 0 <= chosen.cached_v <= largest
    assert chosen.window_v >= 1
    assert chosen.cached_v == largest or chosen.cached_v % SMALLEST == 0
    for rank in range(P):
        V = real_rows(vocab_range(V_all, rank, P), V_all)
        lent = sum(columns for columns, _ in lending_of(chosen))
        columns = chosen.cached_columns(V, T * itemsize, lent=lent, lent_as_planned=True)
        assert 0 <= columns <= V
        if chosen.cached_v == largest:
            assert columns == V


@given(sizes, rows, itemsizes, st.sampled_from(["auto", "cached"]), st.data())
def test_more_bytes_never_cache_less(T, V, itemsize, schedule, data):
    some = data.draw(st.integers(1, 2 * T * V * itemsize + 1))
    more = data.draw(st.integers(some, 4 * T * V * itemsize + 2))
    whole = max(1, T) * V * itemsize
    budgets = some, more, whole
    least, most, all_of_it = (make(T, V, itemsize, schedule, x).cached_v for x in budgets)
    assert least <= most and all_of_it == V


@given(st.integers(1, 20_000), rows, itemsizes, hidden_sizes, st.integers(0, 1000))
@example(8300, 64_000, 2, 4096, 0)
def test_all_tokens_are_taken_at_once_if_they_fit(T, V, itemsize, H, more):
    chosen = make(T, V, itemsize, "in_forward", T * V * itemsize + more, H=H)
    assert len(chunks_of(chosen)) == 1 and not lending_of(chosen)


@pytest.mark.parametrize(("arguments", "schedule", "cached_v", "window_v", "chunks"), [
    ({"schedule": "recompute"}, "recompute", 0, 2 * WAVE, 1),
    # 1 GiB is 65,536 columns; at most 0.3 of them are the window, the others are cached.
    ({"max_logits_bytes": GIB}, "cached", 65536 - 2 * WAVE, 2 * WAVE, 1),
    ({"max_logits_bytes": GIB // 4}, "cached", 16384 - 4864, 4864, 1),
    ({"reduces": True, "H": 4096}, "in_forward", 128256, 4096, 1),
    ({"reduces": True}, "in_forward", 128256, 4096, 2),
    (
        {"V": 256000, "H": 200, "reduces": True, "max_logits_bytes": GIB},
        "cached",
        48640,
        2 * WAVE,
        1,
    ),
    ({"reduces": True, "H": 4096, "expressible": False}, "recompute", 0, 2 * WAVE, 1),
    ({"reduces": True, "H": 4096, "T": 32768}, "in_forward", 128256, 4096, 4),
    ({"T": 32768}, "cached", 64000 - 4096, 4096, 1),
    # In three GEMMs, with a quarter of what PyTorch takes for fp32 logits.
    ({"T": 16384, "H": 7168, "V": 129280, "reduces": True}, "in_forward", 129280, 4096, 1),
    ({"T": 12346, "H": 1536, "V": 151936}, "cached", 151936, WAVE, 1),
    ({"schedule": "cached", "max_logits_bytes": 1}, "recompute", 0, 256, 1),
    ({"schedule": "in_forward"}, "in_forward", 128256, 4096, 2),
    ({"schedule": "in_forward", "H": 1536, "T": 12345}, "in_forward", 128256, 4096, 1),
    ({"schedule": "in_forward", "H": 4096, "T": 32768}, "in_forward", 128256, 4096, 4),
    ({"schedule": "in_forward", "H": 4096, "converts": True}, "in_forward", 128256, 4096, 1),
    ({"T": 0}, "cached", 128256, 4 * WAVE, 1),
])  # fmt: skip
def test_familiar_sizes(arguments, schedule, cached_v, window_v, chunks):
    chosen = make(**arguments)
    by_cache = "cached" if chosen.cached_v else "recompute"
    name = "in_forward" if isinstance(chosen, InForward) else by_cache
    sizes = name, chosen.cached_v, chosen.window_v, len(chunks_of(chosen))
    assert sizes == (schedule, cached_v, window_v, chunks)


@given(st.integers(1, 60_000), rows, st.integers(8, 16_384), st.integers(1 << 20, 1 << 33))
def test_no_window_is_overwritten_before_it_was_used(T, V, H, budget):
    """in_forward may cache exponentials in dweight's memory, which is written last."""
    chosen = make(T, V, 2, "in_forward", budget, H=H)
    assert isinstance(chosen, InForward)
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
