"""Gathers and sums by copies between ranks, on threads (simulated_peers.py).

tests/test_peer_memory.py explores streams, flags and graphs.
"""

import threading
from typing import Any

import pytest
import torch

from flce_dist.kernels import eager
from flce_dist.testing import run_ranks
from tests.parallel_problem import (
    FEW_BYTES,
    IN_PIECES,
    SCHEDULES,
    Outcome,
    Problem,
    joined,
    misses,
    rank_step,
    small_pieces,
)
from tests.simulated_peers import simulated_peers


def with_peers(P: int, problem: Problem, **options: Any) -> Outcome:
    """Return the joined outcome of all ranks; check that only copies moved hidden and dhidden."""
    with small_pieces(), simulated_peers() as meetings:
        ranks = run_ranks(lambda g: rank_step(g, problem, sequence_parallel=True, **options), P)
    outcome = joined(ranks, sequence_parallel=True)
    for meeting in meetings.values():
        assert not any(memory.is_open for memory in meeting.memories)
    assert sum(meeting.copies for meeting in meetings.values()) >= 2
    assert not any(call.startswith(("allgather", "reduce_scatter")) for call in outcome.calls)
    return outcome


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("P", "few"), [(2, {}), (4, {}), (4, FEW_BYTES)])
def test_gradients_are_right(schedule, P, few, dtype):
    problem = IN_PIECES.changed(dtype=dtype)
    assert misses(with_peers(P, problem, schedule=schedule, **few), problem) == []


@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
def test_no_tokens(schedule):
    outcome = with_peers(2, IN_PIECES.changed(T=0), schedule=schedule)
    assert outcome.dhidden.shape == (0, IN_PIECES.H) and not outcome.dweight.any()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_shares_travel_in_the_dtype_that_was_asked_for(wide, schedule):
    problem = IN_PIECES.changed(dtype=torch.bfloat16)
    outcome = with_peers(4, problem, schedule=schedule, reduce_in_fp32=wide)
    assert outcome.dhidden.dtype == torch.bfloat16
    assert misses(outcome, problem) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "H", "P"), [(3, 5, 2), (64, 129, 4), (1, 1, 8), (0, 4, 2)])
def test_shares_are_added_in_fp32(T, H, P, dtype):
    """And rounded once: half a unit in the last place, where 16-bit sums are off by several."""
    shares = torch.randn(P, T, H, generator=torch.Generator().manual_seed(P)).to(dtype)
    exact, found = shares.double().sum(0), torch.sum(shares, 0)
    absolute = P * torch.finfo(torch.float32).eps * shares.double().abs().sum(0)
    assert ((found - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + absolute).all()


@pytest.mark.parametrize("place", ["linear_stats", "row_gradient", "scale_rows"])
@pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
def test_a_call_that_raised_is_made_again(schedule, place, monkeypatch):
    """Every rank raises in the middle of the first call; the second one is right."""
    of_rank, real = threading.local(), getattr(eager, place)

    def raise_once(*args: Any, **options: Any) -> Any:
        if not hasattr(of_rank, "raised"):
            of_rank.raised = True
            raise ArithmeticError
        return real(*args, **options)

    def twice(group: Any) -> Outcome:
        with pytest.raises(ArithmeticError):
            rank_step(group, IN_PIECES, sequence_parallel=True, schedule=schedule)
        return rank_step(group, IN_PIECES, sequence_parallel=True, schedule=schedule)

    monkeypatch.setattr(eager, place, raise_once)
    with small_pieces(), simulated_peers():
        outcome = joined(run_ranks(twice, 2), sequence_parallel=True)
    assert misses(outcome, IN_PIECES) == []
