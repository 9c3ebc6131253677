"""The plan: a pure function whose promises hold for any size and budget."""

import dataclasses
import inspect
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flce_dist.options import Schedule
from flce_dist.plan import DEFAULT_LOGITS_BYTES, Plan, plan
from flce_dist.vocab import VocabShard, vocab_range

GIB = 1 << 30
SMALLEST = 256  # columns or tokens of the smallest piece

sizes = st.one_of(st.integers(0, 600), st.integers(0, 200_000))
rows = st.one_of(st.integers(1, 600), st.integers(1, 300_000))
budgets = st.one_of(st.none(), st.integers(1, 1 << 20), st.integers(1, 1 << 40))
schedules = st.sampled_from(["auto", "recompute", "cached", "in_forward"])
itemsizes = st.sampled_from([2, 4, 8])


def make(
    T: int = 8192,
    V: int = 128256,
    itemsize: int = 2,
    schedule: Schedule = "auto",
    max_logits_bytes: int | None = None,
    expressible: bool = True,
) -> Plan:
    return plan(
        T=T,
        V=V,
        itemsize=itemsize,
        schedule=schedule,
        max_logits_bytes=max_logits_bytes,
        expressible=expressible,
    )


def held_bytes(chosen: Plan, itemsize: int) -> int:
    """What a walk along ``chosen`` holds of the logits, counted piece by piece."""
    if chosen.schedule == "in_forward":
        return max(end - start for start, end in chosen.chunks()) * chosen.V * itemsize
    pieces = range(chosen.cached_v, chosen.V, chosen.window_v)
    window = max((min(chosen.window_v, chosen.V - start) for start in pieces), default=0)
    return chosen.T * (chosen.cached_v + window) * itemsize


@given(sizes, rows, itemsizes, schedules, budgets)
def test_the_budget_is_held(T, V, itemsize, schedule, budget):
    chosen = make(T, V, itemsize, schedule, budget)
    smallest = SMALLEST * itemsize * (V if schedule == "in_forward" else T)
    asked = budget
    if budget is None and schedule in ("auto", "in_forward"):
        asked = DEFAULT_LOGITS_BYTES
    held = held_bytes(chosen, itemsize)
    assert held <= chosen.logits_bytes
    if asked is not None:
        assert chosen.logits_bytes <= max(asked, smallest)


@given(sizes, rows, itemsizes, schedules, budgets)
def test_chunks_cover_the_tokens_once(T, V, itemsize, schedule, budget):
    chunks = make(T, V, itemsize, schedule, budget).chunks()
    assert chunks[0][0] == 0
    assert chunks[-1][1] == T
    for (_, end), (start, _) in itertools.pairwise(chunks):
        assert end == start
    if T:
        assert all(start < end for start, end in chunks)
        lengths = [end - start for start, end in chunks]
        assert all(length % SMALLEST == 0 for length in lengths[:-1])
    if schedule != "in_forward":
        assert len(chunks) == 1


@given(sizes, rows, itemsizes, schedules, budgets, st.integers(1, 8))
def test_cached_columns_and_windows_cover_the_shard_of_every_rank(
    T, V_all, itemsize, schedule, budget, P
):
    """V of the plan is the largest shard's; the others walk the same plan over fewer rows."""
    largest = -(-V_all // P)
    chosen = make(T, largest, itemsize, schedule, budget)
    assert 0 <= chosen.cached_v <= largest
    assert chosen.window_v >= 1
    assert chosen.cached_v == largest or chosen.cached_v % SMALLEST == 0
    for rank in range(P):
        V = VocabShard(*vocab_range(V_all, rank, P), V_all).V
        assert 0 <= chosen.cached_columns(V) <= V
        if chosen.cached_v == largest:
            assert chosen.cached_columns(V) == V


@given(sizes, rows, itemsizes, st.sampled_from(["auto", "cached"]), st.data())
def test_more_bytes_never_cache_less(T, V, itemsize, schedule, data):
    some = data.draw(st.integers(1, 2 * T * V * itemsize + 1))
    more = data.draw(st.integers(some, 4 * T * V * itemsize + 2))
    assert (
        make(T, V, itemsize, schedule, some).cached_v
        <= make(T, V, itemsize, schedule, more).cached_v
    )
    assert make(T, V, itemsize, schedule, max(1, T) * V * itemsize).cached_v == V


@given(sizes, rows, itemsizes, budgets)
def test_what_exponentials_do_not_express_is_recomputed_by_auto(T, V, itemsize, budget):
    chosen = make(T, V, itemsize, "auto", budget, expressible=False)
    assert (chosen.schedule, chosen.cached_v) == ("recompute", 0)


@given(sizes, rows, itemsizes, schedules, budgets)
def test_same_facts_same_plan(T, V, itemsize, schedule, budget):
    arguments = (T, V, itemsize, schedule, budget)
    assert make(*arguments) == make(*arguments)
    assert hash(make(*arguments)) == hash(make(*arguments))


def test_a_plan_knows_nothing_of_the_rank_or_the_machine():
    """Ranks that planned from their own free memory or row count would issue other collectives."""
    assert set(inspect.signature(plan).parameters) == {
        "T", "V", "itemsize", "schedule", "max_logits_bytes", "expressible", "converts",
        "dweight_row_bytes",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "schedule", "cached_v", "window_v", "chunk_t"),
    [
        ({"schedule": "recompute"}, "recompute", 0, 16384, 8192),
        ({"schedule": "cached"}, "cached", 128256, 16384, 8192),
        ({"schedule": "auto"}, "cached", 49152, 16384, 8192),  # 1 GiB: 3/4 cache, 1/4 window
        ({"schedule": "auto", "V": 32064}, "cached", 32064, 16384, 8192),
        ({"schedule": "auto", "max_logits_bytes": 3 * GIB}, "cached", 128256, 16384, 8192),
        ({"schedule": "cached", "max_logits_bytes": 1}, "recompute", 0, 256, 8192),
        ({"schedule": "in_forward", "max_logits_bytes": GIB}, "in_forward", 128256, 4096, 4096),
        ({"schedule": "in_forward", "max_logits_bytes": 1}, "in_forward", 128256, 4096, 256),
        ({"T": 0}, "cached", 128256, 32768, 1),
    ],
)
def test_familiar_sizes(arguments, schedule, cached_v, window_v, chunk_t):
    chosen = make(**arguments)
    assert (chosen.schedule, chosen.cached_v, chosen.window_v, chosen.chunk_t) == (
        schedule, cached_v, window_v, chunk_t,
    )  # fmt: skip


def test_chunks_are_of_like_size():
    """Rather than full ones and a stump that is too small to fill a GPU."""
    chosen = make(9000, schedule="in_forward", max_logits_bytes=GIB)
    lengths = [end - start for start, end in chosen.chunks()]
    assert max(lengths) - min(lengths) <= SMALLEST * len(lengths)


def test_a_plan_is_frozen_and_says_what_it_does():
    chosen = make(schedule="auto", V=32064)
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.cached_v = 0  # type: ignore[misc]
    assert repr(chosen) == (
        "Plan(schedule='cached', T=8192, V=32064, cached_v=32064, window_v=16384, chunk_t=8192, "
        "logits_bytes=525336576)"
    )
