"""Tokens that ranks copy from each other's memory, on simulated ranks: see simulated_peers.py.

What streams, flags and graphs do is explored in tests/test_peer_memory.py.
"""

import itertools
import threading
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flce_dist import linear_cross_entropy_with_metrics
from flce_dist.kernels import eager, gpu
from flce_dist.op import call
from flce_dist.op.dhidden import ChunkDhidden
from flce_dist.op.dlogits import Dlogits
from flce_dist.parallel import peer_copies
from flce_dist.parallel.peer_copies import PeerScatter
from flce_dist.parallel.token_order import TokenOrder
from flce_dist.testing import run_ranks
from tests.parallel_problem import SCHEDULES, Outcome, Problem, joined, misses, rank_step
from tests.simulated_peers import simulated_peers
from tests.test_token_order import FEW, OPTIONS, PROBLEM, small_pieces


@pytest.fixture(params=[0, 1 << 60], ids=["products", "accumulators"])
def from_cells(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """From how many cells on dhidden is one product where it can be: from none, or never."""
    monkeypatch.setattr(call, "_PRODUCT_FROM", request.param)
    return request.param


def with_peers(P: int, problem: Problem, **options: Any) -> Outcome:
    """All ranks' outcome, hidden in pieces, which nothing but copies moved."""
    with small_pieces(), simulated_peers() as meetings:
        ranks = run_ranks(lambda g: rank_step(g, problem, sequence_parallel=True, **options), P)
    outcome = joined(ranks, sequence_parallel=True)
    for meeting in meetings.values():
        assert {memory._capture for memory in meeting.memories} == {None}, "left open"
    assert sum(meeting.copies for meeting in meetings.values()) >= 2
    assert not any(call.startswith(("allgather", "reduce_scatter")) for call in outcome.calls)
    return outcome


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("P", "few"), [(2, {}), (4, {}), (4, FEW)])
def test_gradients_are_right(schedule, P, few, dtype, from_cells):
    problem = PROBLEM.changed(dtype=dtype)
    assert misses(with_peers(P, problem, schedule=schedule, **few), problem) == []


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS["none"],
        OPTIONS["token weights"],
        OPTIONS["smoothing"],
        {"z_loss_weight": 1e-2, "logit_scale": 0.5},
        {"softcap": 5.0, "reduction": "sum"},
    ],
)
def test_options(options, from_cells):
    problem = PROBLEM.changed(options=options)
    assert misses(with_peers(4, problem, schedule="cached"), problem) == []


@pytest.mark.parametrize("schedule", ["recompute", "in_forward"])
def test_no_tokens(schedule):
    outcome = with_peers(2, PROBLEM.changed(T=0), schedule=schedule)
    assert outcome.dhidden.shape == (0, PROBLEM.H) and not outcome.dweight.any()


def test_of_one_rank_nothing_is_copied():
    with simulated_peers() as meetings:
        ranks = run_ranks(lambda g: rank_step(g, PROBLEM, sequence_parallel=True), 1)
    assert not meetings and misses(joined(ranks, sequence_parallel=True), PROBLEM) == []


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_shares_travel_in_the_dtype_that_was_asked_for(wide, schedule, from_cells):
    problem = PROBLEM.changed(dtype=torch.bfloat16)
    outcome = with_peers(4, problem, schedule=schedule, reduce_in_fp32=wide)
    assert outcome.dhidden.dtype == torch.bfloat16
    assert misses(outcome, problem) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "H", "P"), [(3, 5, 2), (64, 129, 4), (1, 1, 8), (0, 4, 2)])
def test_sum_shares(T, H, P, dtype):
    """The sum in fp32, rounded once, to the bit, whoever adds it up."""
    shares = torch.randn(P, T, H, generator=torch.Generator().manual_seed(P)).to(dtype)
    expected, scale = torch.zeros(T, H), torch.linspace(-2, 3, T)
    for share in shares:
        expected += share.float()
    for rank, kernels in itertools.product(range(P), (eager, gpu)):
        others, out = torch.cat([shares[:rank], shares[rank + 1 :]]), torch.empty(T, H, dtype=dtype)
        kernels.sum_shares(shares[rank], others, rank, None, out=out)
        torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0)
        kernels.sum_shares(shares[rank], others, rank, scale, out=out)
        torch.testing.assert_close(out, (expected * scale[:, None]).to(dtype), rtol=0, atol=0)


def loss_beside_metrics(*args: Any, **options: Any) -> torch.Tensor:
    return linear_cross_entropy_with_metrics(*args, **options)[0]


@pytest.mark.parametrize(
    ("how", "changes", "products"),
    [
        ({"schedule": "cached"}, {}, {True}),
        ({"schedule": "cached"}, {"V_all": 5}, {True}),  # the third rank has one row, the last none
        ({"schedule": "cached", "reduce_in_fp32": True}, {"dtype": torch.bfloat16}, {True}),
        ({"schedule": "in_forward"}, {}, {True}),
        ({"schedule": "in_forward", "max_logits_bytes": 10_000}, {}, {False, True}),  # one lends
        ({"schedule": "cached", "call": loss_beside_metrics}, {}, {False}),
        ({"schedule": "cached"}, {"options": {"label_smoothing": 0.1}}, {False}),
        ({"schedule": "cached"}, {"dtype": torch.float16}, {False}),
        ({"schedule": "cached", **FEW}, {}, {False}),
        ({"schedule": "recompute"}, {}, {False}),
    ],
)
def test_where_dhidden_is_one_product(how, changes, products, monkeypatch):
    """The sum has the scales then, on every rank, and there is no accumulator."""
    monkeypatch.setattr(call, "_PRODUCT_FROM", 0)
    sums, accumulators = [], []
    real_sum, accumulator = eager.sum_shares, PeerScatter.accumulator

    def note(own: Any, others: Any, rank: int, scale: Any, *, out: Any) -> None:
        sums.append(scale is not None)
        real_sum(own, others, rank, scale, out=out)

    def note_accumulator(*args: Any) -> Any:
        accumulators.append(args)
        return accumulator(*args)

    monkeypatch.setattr(eager, "sum_shares", note)
    monkeypatch.setattr(PeerScatter, "accumulator", note_accumulator)
    problem = PROBLEM.changed(**changes)
    assert misses(with_peers(4, problem, **how), problem) == []
    assert set(sums) == products and bool(accumulators) == (False in products)


@pytest.mark.parametrize("schedule", ["recompute", "cached"])
def test_hidden_and_windows_go_before_there_is_dhidden(schedule, monkeypatch):
    """Each rank's D, which holds them, is gone when memory for the sum over ranks is taken."""
    of_rank, left = threading.local(), []
    init, wait = Dlogits.__post_init__, PeerScatter.wait

    def note(self: Dlogits) -> None:
        of_rank.dlogits = weakref.ref(self)
        init(self)

    def look(self: PeerScatter) -> torch.Tensor:
        left.append(of_rank.dlogits())
        return wait(self)

    monkeypatch.setattr(Dlogits, "__post_init__", note)
    monkeypatch.setattr(PeerScatter, "wait", look)
    with_peers(2, PROBLEM, schedule=schedule)
    assert left == [None, None]


@pytest.mark.parametrize("place", ["linear_stats", "row_gradient", "scale_rows", "sum_shares"])
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
            rank_step(group, PROBLEM, sequence_parallel=True, schedule=schedule)
        return rank_step(group, PROBLEM, sequence_parallel=True, schedule=schedule)

    monkeypatch.setattr(eager, place, raise_once)
    with small_pieces(), simulated_peers():
        outcome = joined(run_ranks(twice, 2), sequence_parallel=True)
    assert misses(outcome, PROBLEM) == []


@given(st.integers(1, 8), st.integers(1, 5000), st.sampled_from([8, 264, 4096]))
def test_the_accumulator_turns_into_tokens_in_place(P, tokens, H):
    """No block is written over what is not turned yet, and the peers' shares fit behind."""
    T, order = P * tokens, TokenOrder(P, ((0, P * tokens),))
    memory, reserved = mock.Mock(P=P, rank=0), list[int]()
    memory.open = reserved.append
    memory.own = lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
    scatter = PeerScatter((T, H), torch.bfloat16, order, memory, eager.sum_shares, accumulates=True)
    blocks = scatter.blocks(T)
    assert [b.start for b in blocks[1:]] == [b.stop for b in blocks[:-1]]
    assert (blocks[0].start, blocks[-1].stop) == (0, T) and len(blocks) <= 4
    for block in blocks:
        assert 2 * H * block.stop <= scatter._acc_start + 4 * H * block.start
    assert scatter._others_start >= 2 * T * H and scatter._acc_start % 512 == 0
    assert scatter._others_start + 2 * (P - 1) * tokens * H <= reserved[0]
    assert scatter._acc_start + 4 * T * H <= reserved[0]


# --- planted mistakes


def own_share_twice(patch: pytest.MonkeyPatch) -> None:
    def wrong(own: Any, others: Any, *args: Any, out: Any) -> None:
        eager.__dict__["real_sum"](own, torch.cat([own[None], others[1:]]), *args, out=out)

    patch.setitem(eager.__dict__, "real_sum", eager.sum_shares)
    patch.setattr(eager, "sum_shares", wrong)


def own_tokens_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = peer_copies.PeerGather.start

    def start(self: peer_copies.PeerGather, piece: int) -> None:
        real(self, piece)
        self.tokens[self._order.part(0, self._memory.rank)] = 0.0

    patch.setattr(peer_copies.PeerGather, "start", start)


def the_first_piece_for_all(patch: pytest.MonkeyPatch) -> None:
    real = peer_copies.PeerScatter._copy
    patch.setattr(peer_copies.PeerScatter, "_copy", lambda self, _, others: real(self, 0, others))


def peers_over_own_tokens(patch: pytest.MonkeyPatch) -> None:
    real = peer_copies.PeerScatter.__init__

    def wrong(self: peer_copies.PeerScatter, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self._others_start = 0

    patch.setattr(peer_copies.PeerScatter, "__init__", wrong)


def scales_of_other_tokens(patch: pytest.MonkeyPatch) -> None:
    def wrong(own: Any, others: Any, rank: int, scale: Any, *, out: Any) -> None:
        eager.__dict__["real_sum"](own, others, rank, scale.flip(0), out=out)

    patch.setitem(eager.__dict__, "real_sum", eager.sum_shares)
    patch.setattr(eager, "sum_shares", wrong)


def scales_twice(patch: pytest.MonkeyPatch) -> None:
    real = ChunkDhidden.finish

    def finish(self: ChunkDhidden) -> None:
        scale = self._dlogits.rows.scale
        assert scale is not None
        self.share.mul_(scale[:, None])
        real(self)

    patch.setattr(ChunkDhidden, "finish", finish)


def nobody_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peer_copies.PeerGather, "wait", peer_copies.PeerGather.start)


SCALES = (scales_of_other_tokens, scales_twice)


@pytest.mark.parametrize(
    ("plant", "dtype"),
    [
        (scales_of_other_tokens, torch.float32),
        (scales_twice, torch.bfloat16),
        (own_share_twice, torch.bfloat16),
        (own_tokens_forgotten, torch.bfloat16),
        (the_first_piece_for_all, torch.float32),
        (peers_over_own_tokens, torch.bfloat16),
        (nobody_waits, torch.bfloat16),
    ],
)
def test_a_mistake_would_show(plant, dtype, monkeypatch):
    monkeypatch.setattr(call, "_PRODUCT_FROM", 0 if plant in SCALES else 1 << 60)
    plant(monkeypatch)
    problem = PROBLEM.changed(dtype=dtype)
    try:
        outcome = with_peers(4, problem, schedule="cached")
    except Exception:  # shapes that do not fit, memory that may not be written
        return
    assert misses(outcome, problem) != []
