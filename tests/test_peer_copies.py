"""Gathers and sums by copies between ranks that are threads of one process, without streams.

All peers' data travel when every rank has published its own, but until a copy is waited for its
destination holds NaN. tests/test_peer_memory.py has the real PeerMemory: orders, graphs, failures.
"""

import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flce_dist.parallel import transport
from flce_dist.parallel.transport import PeerMemories
from flce_dist.testing import run_ranks
from tests.outcomes import Outcome
from tests.parallel_problem import (
    FEW_BYTES,
    IN_CHUNKS,
    SCHEDULES,
    Problem,
    joined,
    misses,
    rank_step,
    small_chunks,
)
from tests.processes import LAST_RESORT_S


class Meeting:
    def __init__(self, P: int) -> None:
        self.barrier = threading.Barrier(P, timeout=LAST_RESORT_S)
        self.blocks: dict[int, Tensor] = {}
        self.copies = 0


class SimulatedMemory:
    """``PeerMemory`` of a rank that is a thread."""

    def __init__(self, meeting: Meeting, rank: int, P: int) -> None:
        self.rank, self.P, self.nbytes, self.is_open = rank, P, 0, False
        self._meeting, self._writable = meeting, False

    def open(self, nbytes: int) -> None:
        """The block of a use holds NaN at first."""
        self._meeting.blocks[self.rank] = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
        self.is_open, self._writable = True, False

    def close(self) -> None:
        self.is_open = False

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        end = torch.Size(shape).numel() * dtype.itemsize
        assert end <= len(self._meeting.blocks[rank]), "beyond what was reserved"
        return self._meeting.blocks[rank][:end].view(dtype).view(shape)

    def acquire(self) -> None:
        assert self.is_open
        self._writable = True

    def pull(self, copy: Any) -> "Arrival":
        assert self._writable, "written before the peers had read it"
        self._writable = False
        return self._copied(copy, [r for r in range(self.P) if r != self.rank])

    def pull_beside(self, mine: Any, copy: Any) -> "Arrival":
        assert self.is_open
        self.copy(*mine)
        return self._copied(copy, range(self.P))

    def _copied(self, copy: Any, ranks: Sequence[int]) -> "Arrival":
        self._meeting.barrier.wait()
        found = [copy(r) for r in ranks]
        arrival = Arrival([(x[rows], y[their_rows].clone()) for x, rows, y, their_rows in found])
        self._meeting.copies += len([r for r in ranks if r != self.rank])
        self._meeting.barrier.wait()
        return arrival

    def copy(self, out: Tensor, rows: slice, source: Tensor, source_rows: slice) -> None:
        out[rows] = source[source_rows]


class Arrival:
    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs
        for out, theirs in pairs:
            assert out.is_contiguous() and out.shape == theirs.shape and out.dtype == theirs.dtype
            out.fill_(torch.nan)

    def wait(self) -> None:
        for out, theirs in self._pairs:
            out.copy_(theirs)


def with_peers(P: int, problem: Problem, **options: Any) -> Outcome:
    """Return the joined outcome of all ranks; check that only copies moved hidden and dhidden."""
    meetings = [Meeting(P), Meeting(P)]
    made: list[list[Any]] = [[SimulatedMemory(x, rank, P) for x in meetings] for rank in range(P)]
    memories = [PeerMemories(*both) for both in made]
    patched = mock.patch.object(transport, "memories_of", lambda g, _: memories[g.rank()])
    with small_chunks(), patched:
        ranks = run_ranks(lambda g: rank_step(g, problem, sequence_parallel=True, **options), P)
    outcome = joined(ranks, sequence_parallel=True)
    assert not any(memory.is_open for both in made for memory in both)
    assert sum(meeting.copies for meeting in meetings) >= 2
    assert not any(call.startswith(("allgather", "reduce_scatter")) for call in outcome.calls)
    return outcome


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("P", "T", "options"),
    [(2, 0, {}), (2, IN_CHUNKS.T, {}), (4, IN_CHUNKS.T, FEW_BYTES),
     (4, IN_CHUNKS.T, {}), (4, IN_CHUNKS.T, {"reduce_in_fp32": True})],
)  # fmt: skip
def test_gradients_are_right(P, T, options, schedule, dtype):
    problem = IN_CHUNKS.changed(T=T, dtype=dtype)
    assert misses(with_peers(P, problem, schedule=schedule, **options), problem) == []
