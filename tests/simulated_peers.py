"""A driver between the threads of one process, so that the real PeerMemory runs without GPUs.

The current stream executes operations at once. Other streams execute them as late as possible: a
copy runs when its event is waited for, or when the current stream waits for a flag that other ranks
set only after such copies. Until then its destination holds NaN. Flags are int32 words of this
process. test_peer_memory.py explores orders of streams, graphs and failures.
"""

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flce_dist.parallel import peer_memory, transport
from flce_dist.parallel.peer_memory import PeerMemory
from flce_dist.parallel.transport import PeerMemories
from tests.processes import LAST_RESORT_S


class Meeting:
    """What the ranks of one PeerMemory share."""

    def __init__(self, P: int) -> None:
        self.barrier = threading.Barrier(P, timeout=LAST_RESORT_S)
        self.changed = threading.Condition(threading.RLock())
        self.said: dict[int, Any] = {}
        self.late: list[Late] = []
        self.memories: list[PeerMemory] = []
        self.copies = 0

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        self.said[rank] = mine
        self.barrier.wait()
        said = [self.said[rank] for rank in sorted(self.said)]
        self.barrier.wait()
        return said

    def wait_until(self, reached: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(reached, LAST_RESORT_S), "waited in vain for another rank"


class SharedBlock:
    """Every rank's bytes, which read as NaN at first."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.nbytes, self.in_graph, self._parts = parts[0].numel(), False, parts

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        end = torch.Size(shape).numel() * dtype.itemsize
        assert end <= self.nbytes, "beyond what was reserved"
        return self._parts[rank][:end].view(dtype).view(shape)

    def address(self, rank: int) -> int:
        return self._parts[rank].data_ptr()


class Operation(NamedTuple):
    """Of a stream, which begins when it is ``ready``."""

    run: Callable[[], Any]
    ready: Callable[[], bool] = lambda: True


class Now:
    """The current stream of a rank."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def wait_stream(self, other: "Late") -> None:
        """Copies that matter have been waited for by their events."""

    def do(self, operation: Operation) -> None:
        if not operation.ready():
            # Other ranks may set the flag only after copies that nobody waits for yet.
            self._meeting.wait_until(lambda: self._goes_on(operation))
        with self._meeting.changed:
            operation.run()
            self._meeting.changed.notify_all()

    def _goes_on(self, operation: Operation) -> bool:
        for stream in self._meeting.late:
            stream.advance(math.inf)
        return operation.ready()


class Late:
    """Another stream."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._pending, self._done = meeting, list[Operation](), 0
        meeting.late.append(self)

    def wait_stream(self, other: Now) -> None:
        """The current stream has executed everything."""

    def do(self, operation: Operation) -> None:
        self._pending.append(operation)

    def record_event(self) -> "Event":
        return Event(self._meeting, self, self._done + len(self._pending))

    def advance(self, to: float) -> bool:
        """Execute operations up to number ``to`` if possible; return whether they are done."""
        with self._meeting.changed:
            while self._done < to and self._pending and self._pending[0].ready():
                self._pending.pop(0).run()
                self._done += 1
                self._meeting.changed.notify_all()
            return self._done >= to


class Event(NamedTuple):
    meeting: Meeting
    stream: Late
    at: int

    def wait(self) -> None:
        self.meeting.wait_until(lambda: self.stream.advance(self.at))


class Deferred(TorchDispatchMode):
    """Issues copies on ``stream`` instead of executing them."""

    def __init__(self, stream: Late, meeting: Meeting) -> None:
        super().__init__()
        self._stream, self._meeting = stream, meeting

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is not torch.ops.aten.copy_.default:
            return op(*args, **(kwargs or {}))
        out, theirs = args[:2]
        assert out.is_contiguous() and theirs.is_contiguous()
        assert out.shape == theirs.shape and out.dtype == theirs.dtype
        out.fill_(torch.nan)
        self._meeting.copies += 1
        self._stream.do(Operation(lambda: out.copy_(theirs)))
        return out


class ThreadDriver:
    """``PeerDriver`` of a rank that is a thread."""

    def __init__(self, meeting: Meeting, rank: int, P: int) -> None:
        self.rank, self.P, self.where, self.limit_s = rank, P, f"rank {rank}", math.inf
        self._meeting, self._now = meeting, Now(meeting)
        self._words: list[Tensor] = []
        self._late: list[Late] = []

    def current_stream(self) -> Now:
        return self._now

    def side_stream(self) -> Late:
        self._late.append(Late(self._meeting))
        return self._late[-1]

    def on(self, stream: Late) -> Any:
        return Deferred(stream, self._meeting)

    def capture(self) -> int:
        return 0

    def keep(self, x: Tensor, stream: Late) -> None:
        """Python keeps it alive."""

    def shared(self, nbytes: int) -> SharedBlock:
        mine = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
        return SharedBlock(self._meeting.exchange(self.rank, mine))

    def host_words(self, n: int) -> Tensor:
        self._words.append(torch.zeros(n, dtype=torch.int32))
        return self._words[-1]

    def put(self, address: int, value: int) -> Operation:
        return Operation(functools.partial(setattr, _flag(address), "value", value))

    def wait_for(self, address: int, value: int) -> Operation:
        flag = _flag(address)
        return Operation(lambda: None, ready=lambda: flag.value == value)

    def enqueue(self, operations: list[Operation], stream: Now | Late) -> None:
        for operation in operations:
            stream.do(operation)

    def meet(self, message: str) -> list[str]:
        for stream in self._late:
            stream.record_event().wait()
        return self._meeting.exchange(self.rank, message)


def _flag(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


@contextmanager
def simulated_peers() -> Iterator[dict[str, Meeting]]:
    """Let the ranks of every threaded group copy from each other; yields the meetings by name."""
    meetings: dict[str, Meeting] = {}
    memories: dict[tuple[str, int], PeerMemories] = {}
    one = threading.Lock()

    def of_group(group: dist.ProcessGroup, device: torch.device) -> PeerMemories | None:
        P, rank, name = group.size(), group.rank(), group.group_name
        if P == 1:
            return None
        if (name, rank) not in memories:
            with one:
                both = [meetings.setdefault(f"{name}/{i}", Meeting(P)) for i in range(2)]
            drivers: list[Any] = [ThreadDriver(meeting, rank, P) for meeting in both]
            memories[name, rank] = PeerMemories(*(PeerMemory(one, "tokens") for one in drivers))
            for meeting, memory in zip(both, memories[name, rank], strict=True):
                meeting.memories.append(memory)
        return memories[name, rank]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "memories_of", of_group)
        patch.setattr(peer_memory, "watch", lambda wait: None)  # by a thread that would stay
        yield meetings
