"""Peer memory between the threads of one process: what ``peer_copies`` does, without GPUs.

Ranks meet where GPUs raise flags. What a rank may not write yet, or has not written, is noticed.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import peer_memory
from flce_dist.peer_memory import Copy, PeerMemories, PeerMemory

PATIENCE = 60.0  # seconds


class Meeting:
    """What the ranks of one group have in common."""

    def __init__(self, P: int) -> None:
        self.barrier = threading.Barrier(P, timeout=PATIENCE)
        self.memories: dict[int, Tensor] = {}
        self.pulls = 0  # of rank 0


class Late:
    """What was copied is there when it is waited for, and NaN before."""

    def __init__(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        self.copies = copies
        for out, _ in copies:
            out.fill_(torch.nan)

    def wait(self) -> None:
        for out, copy in self.copies:
            out.copy_(copy)
        self.copies = []


class SimulatedMemory(PeerMemory):
    """One thread's view of the memories of all ranks."""

    def __init__(self, meeting: Meeting, rank: int, P: int) -> None:
        self.P, self.rank, self._meeting = P, rank, meeting
        self.peers = [(rank + i) % P for i in range(1, P)]
        self._writable = False

    def reserve(self, nbytes: int) -> None:
        mine = self._meeting.memories.get(self.rank)
        if mine is not None and nbytes <= mine.numel():
            return
        self._meeting.barrier.wait()
        self._meeting.memories[self.rank] = torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # NaN
        self._meeting.barrier.wait()

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, start: int = 0) -> Tensor:
        end = start + torch.Size(shape).numel() * dtype.itemsize
        memory = self._meeting.memories[rank]
        assert end <= memory.numel(), "beyond what was reserved"
        return memory[start:end].view(dtype).view(*shape)

    def acquire(self) -> None:
        self._writable = True

    def pull(self, copies: Sequence[Copy]) -> list[Any]:
        assert self._writable, "published what may not have been written"
        self._writable = False
        self._meeting.pulls += self.rank == 0
        self._meeting.barrier.wait()
        arrivals: list[Late] = []
        for copy in copies:
            pairs = [copy(peer) for peer in self.peers]
            for out, theirs in pairs:
                assert out.is_contiguous() and theirs.is_contiguous()
                assert out.shape == theirs.shape and out.dtype == theirs.dtype
            arrivals.append(Late([(out, theirs.clone()) for out, theirs in pairs]))
        self._meeting.barrier.wait()
        return arrivals

    def end_read(self) -> None:
        pass


@contextmanager
def simulated_peers() -> Iterator[dict[str, Meeting]]:
    """Let every group of threads copy from each other; yields the groups' meetings by name."""
    meetings: dict[str, Meeting] = {}
    memories: dict[tuple[str, int], PeerMemories] = {}
    one = threading.Lock()

    def of_group(group: dist.ProcessGroup, device: torch.device) -> PeerMemories | None:
        P, rank, name = group.size(), group.rank(), group.group_name
        if P == 1:
            return None
        with one:
            if (name, rank) not in memories:
                both = [meetings.setdefault(f"{name}/{i}", Meeting(P)) for i in range(2)]
                memories[name, rank] = PeerMemories(*(SimulatedMemory(m, rank, P) for m in both))
            return memories[name, rank]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "of_group", of_group)
        yield meetings
