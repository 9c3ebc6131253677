"""Tokens of sequence-parallel ranks are gathered in pieces: which, and in which order."""

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from flce_dist.op.plan import Plan, pieces, plan
from flce_dist.parallel.collectives import TokenGather
from flce_dist.parallel.token_order import TokenOrder
from tests.parallel_problem import FEW_BYTES, IN_PIECES, on_threads, small_pieces


def calls_in_pieces(**options: Any) -> Any:
    with small_pieces():
        return on_threads(4, IN_PIECES, sequence_parallel=True, **options).calls


def test_the_second_piece_is_on_its_way_before_the_first_one_s_logits():
    """Its gather is issued after the sum that those logits wait for, and before later sums."""
    sums = ("allreduce MAX float32[48]", "allreduce SUM float32[48]")
    scatters = ("reduce_scatter SUM float32[256]", "reduce_scatter SUM float32[1280]")
    gathers = ("allgather float32[64]", "allgather float32[320]")
    forward = (
        gathers[0], "allreduce SUM float32[8]", gathers[1], "allreduce SUM float32[40]", *sums,
    )  # fmt: skip
    assert calls_in_pieces(schedule="cached") == (*forward, *gathers, *scatters)
    assert calls_in_pieces(schedule="in_forward") == (*forward, *scatters)


def test_a_chunk_s_dhidden_is_summed_before_the_next_chunk():
    kinds = [call.split()[0] for call in calls_in_pieces(schedule="in_forward", **FEW_BYTES)]
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
    assert list(order.between(2, 8)) == [(1, (2, 8))]
    assert TokenOrder(2, ((0, 8),)).permuted(callers) is callers
    assert TokenOrder(1, ((0, 2), (2, 8))).restored(callers) is callers


def test_what_is_all_here_is_not_copied():
    """Also if one rank's hidden is column-major."""
    hidden = torch.randn(8, 6).T
    assert TokenGather(hidden, TokenOrder(1, ((0, 6),))).wait_all() is hidden


sizes = st.integers(0, 40_000)


@given(sizes, st.integers(1, 300_000), st.integers(1, 12), st.sampled_from(["auto", "in_forward"]))
def test_pieces_hold_as_many_tokens_of_each_rank(t, V, ranks, schedule):
    chosen = _plan(t * ranks, V, ranks, schedule)
    bounds, chunks = pieces(chosen, ranks), chosen.chunks()
    assert bounds[0][0] == 0 and bounds[-1][1] == t * ranks
    assert all(bound % ranks == 0 for piece in bounds for bound in piece)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    order = TokenOrder(ranks, bounds)
    for first, last in chunks:  # whole pieces each
        of_chunk = [ends for _, ends in order.between(first, last)]
        assert (of_chunk[0][0], of_chunk[-1][1]) == (first, last)


def test_familiar_pieces():
    assert pieces(_plan(8192, 32064, 4, "cached"), 4) == ((0, 1024), (1024, 8192))
    assert pieces(_plan(8192, 32064, 1, "cached"), 1) == ((0, 8192),)
    assert pieces(_plan(1024, 32064, 4, "cached"), 4) == ((0, 1024),)
    assert pieces(_plan(8190, 32064, 3, "cached"), 3) == ((0, 1536), (1536, 8190))


def _plan(tokens: int, V: int, ranks: int, schedule: Any) -> Plan:
    return plan(
        T=tokens, V=V, itemsize=2, schedule=schedule, max_logits_bytes=None, gathers_from=ranks,
        dweight_row_bytes=(8192, 16384),
    )  # fmt: skip
