"""Tokens of sequence-parallel ranks are gathered in chunks: which, and in which order."""

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from flce_dist.op.plan import plan
from flce_dist.parallel.collectives import TokenGather
from flce_dist.parallel.token_order import TokenOrder
from tests.parallel_problem import FEW_BYTES, IN_CHUNKS, on_threads, small_chunks


def calls_of(**options: Any) -> Any:
    with small_chunks():
        return on_threads(4, IN_CHUNKS, sequence_parallel=True, **options).calls


def test_the_next_chunk_is_on_its_way_before_the_logits_of_one():
    """Its gather is issued after the sum that those logits wait for, and before later sums."""
    calls = calls_of(schedule="in_forward", **FEW_BYTES)
    second = [k for k, call in enumerate(calls) if call.startswith("allgather")][1]
    assert calls[second - 1].startswith("allreduce SUM")
    assert calls[second + 1].startswith("allreduce MAX")


def test_all_tokens_are_gathered_at_once_where_they_are_one_chunk():
    sums = ("SUM float32[48]", "MAX float32[48]", "SUM float32[48]")
    forward = ("allgather float32[384]", *(f"allreduce {each}" for each in sums))
    scatter = "reduce_scatter SUM float32[1536]"
    assert calls_of(schedule="cached") == (*forward, forward[0], scatter)
    assert calls_of(schedule="in_forward") == (*forward, scatter)


def test_a_chunk_s_dhidden_is_summed_before_the_next_chunk():
    kinds = [call.split()[0] for call in calls_of(schedule="in_forward", **FEW_BYTES)]
    first_scatter = kinds.index("reduce_scatter")
    assert kinds.count("reduce_scatter") == kinds.count("allgather") > 2
    assert "allreduce" in kinds[first_scatter:]


def test_the_order_by_an_example():
    """Two ranks of four tokens: their first ones, then the other three of each."""
    order = TokenOrder(2, ((0, 2), (2, 8)))
    callers = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13])
    assert order.permuted(callers).tolist() == [0, 10, 1, 2, 3, 11, 12, 13]
    assert order.restored(order.permuted(callers)).equal(callers)
    assert [order.local(k) for k in range(2)] == [slice(0, 1), slice(1, 4)]
    assert TokenOrder(2, ((0, 8),)).permuted(callers) is callers
    assert TokenOrder(1, ((0, 2), (2, 8))).restored(callers) is callers


def test_what_is_all_here_is_not_copied():
    """Also if one rank's hidden is column-major."""
    hidden = torch.randn(8, 6).T
    assert TokenGather(hidden, TokenOrder(1, ((0, 6),))).wait_all() is hidden


sizes = st.integers(0, 40_000)


@given(sizes, st.integers(1, 300_000), st.integers(1, 12), st.sampled_from(["auto", "in_forward"]))
def test_chunks_hold_as_many_tokens_of_each_rank(t, V, ranks, schedule):
    chosen = plan(
        T=t * ranks, V=V, itemsize=2, schedule=schedule, max_logits_bytes=None, gathers_from=ranks,
        dweight_row_bytes=(8192, 16384),
    )  # fmt: skip
    bounds = chosen.chunks()
    assert bounds[0][0] == 0 and bounds[-1][1] == t * ranks
    assert all(bound % ranks == 0 for chunk in bounds for bound in chunk)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
