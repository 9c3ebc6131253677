"""Ranks whose GPU is that of fake_cuda.py: threads, of which one runs until it meets the others."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flce_dist.testing.forked_ranks import without_collections
from tests.fake_cuda import Event, FakeBlock, FakeTensor, Graph, Storage, Stream
from tests.fake_machine import Machine, Op, Wrong
from tests.processes import LAST_RESORT_S


class Hung(RuntimeError):
    """This rank's GPU waits for ever; the watchdog would end its process."""


class Fault(RuntimeError):
    """A planted failure."""


class Rank:
    """One rank's host and GPU.

    Methods from ``current_stream`` to ``meet`` are what PeerDriver is to PeerMemory; those behind
    them issue what a test's program does beside it.
    """

    limit_s = 10.0

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine = machine
        self.rank = rank
        self.P = machine.P
        self.where = f"rank {rank}"
        self.streams: list[int] = []
        self.free: dict[tuple[Stream, int], list[int]] = {}
        self.graph: Graph | None = None
        self.current = Stream(self)
        self._collectives = Stream(self), 0  # and how many were issued there
        self.faults_in = -1
        self.calls = 0
        self._words: list[torch.Tensor] = []
        self.said: tuple[str, Any] | None = None
        self.heard: list[tuple[str, Any]] | Exception = []
        self.runs = threading.Semaphore(0)
        self.paused = threading.Semaphore(0)

    def fault(self) -> None:
        """Raise if this call was chosen to fail."""
        self.calls += 1
        self.faults_in -= 1
        if self.faults_in == 0:
            raise Fault

    @contextmanager
    def outside_the_call(self) -> Iterator[None]:
        """Calls in this block neither count as steps nor fail."""
        steps = self.calls, self.faults_in
        self.faults_in = 0
        yield
        self.calls, self.faults_in = steps

    def current_stream(self) -> Stream:
        return self.current

    def side_stream(self) -> Stream:
        return Stream(self)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self.current = stream
        try:
            yield
        finally:
            self.current = before

    def capture(self) -> int:
        return 0 if self.current._graph is None else self.current._graph.id

    def shared(self, nbytes: int) -> FakeBlock:
        number = self.machine.number()
        return FakeBlock(self, nbytes, [int(theirs) for _, theirs in self.meet("shares", number)])

    def keep(self, x: FakeTensor, stream: Stream) -> None:
        if isinstance(x.storage, Storage):
            x.storage.used_by.append(stream)

    def host_words(self, n: int) -> torch.Tensor:
        self._words.append(torch.zeros(n, dtype=torch.int32))
        for word in self._words[-1].unbind():
            self.machine.host_words[word.data_ptr()] = word
        return self._words[-1]

    def put(self, address: int, value: int) -> Op:
        return Op("host" if address in self.machine.host_words else "put", address, value)

    def wait_for(self, address: int, value: int) -> Op:
        return Op("wait", address, value)

    def batch(self, *operations: Op) -> tuple[Op, ...]:
        return operations

    def enqueue(self, batch: tuple[Op, ...], stream: Stream) -> None:
        self.fault()
        stream.add(*batch)

    def event(self) -> Event:
        return Event()

    def copy(
        self, out: FakeTensor, rows: slice, source: FakeTensor, source_rows: slice, stream: Stream
    ) -> None:
        with self.on(stream):
            out[rows].copy_(source[source_rows])

    def meet(self, reason: str, facts: Any) -> list[tuple[str, Any]]:
        self.said = reason, facts
        self.paused.release()
        self.runs.acquire()
        self.said = None
        if isinstance(self.heard, Exception):
            raise self.heard
        return self.heard

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> FakeTensor:
        self.fault()
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        tensor = FakeTensor(self, Storage(self, nbytes), 0, shape, dtype)
        if self.graph is not None:
            self.graph.tensors.append(tensor)
        return tensor

    def launch(
        self,
        reads: list[FakeTensor],
        writes: list[FakeTensor],
        run: Callable[[list[Any]], list[Any]],
    ) -> None:
        """Run a kernel or a copy on the current stream."""
        self.fault()
        for tensor in (*reads, *writes):
            tensor.check_mapped()
        if self.current._graph is not None:
            self.current._graph.tensors += [*reads, *writes]
        rows = [tuple(row for x in tensors for row in x.rows) for tensors in (reads, writes)]
        self.current.add(Op("kernel", reads=rows[0], writes=rows[1], run=run))

    def all_reduce(self) -> None:
        """Issue a collective as NCCL does: a kernel that ends once all ranks' have begun."""
        stream, n = self._collectives
        self._collectives = stream, n + 1

        def begun(at: int, by: int) -> int:
            return -1 - (n * self.P + at) * self.P - by  # no address of the machine

        others = [rank for rank in range(self.P) if rank != self.rank]
        stream.wait_stream(self.current)
        stream.add(
            *(Op("put", begun(at=rank, by=self.rank), 1) for rank in others),
            *(Op("wait", begun(at=self.rank, by=rank), 1) for rank in others),
        )
        self.current.wait_stream(stream)

    def fill(self, x: FakeTensor, tags: list[Any]) -> FakeTensor:
        self.launch([], [x], lambda _: tags)
        return x

    def expect(self, x: FakeTensor, tags: list[Any]) -> None:
        def check(found: list[Any]) -> list[Any]:
            if found != tags:
                raise Wrong(f"rank {self.rank} expected {tags}, found {found}")
            return []

        self.launch([x], [], check)

    @contextmanager
    def capturing(self) -> Iterator[Graph]:
        """Capture what is issued on the current stream; discard it if the block raises."""
        self.graph = graph = Graph(self, self.current)
        try:
            yield graph
            graph.check_joined()
        finally:
            self.graph = None


# Python finalizes all of a cycle before it frees any: the fake memory of tensors too early.
@without_collections()
def run(
    P: int, program: Callable[[Rank], None], *, seeds: int = 0, one_queue: bool = False
) -> list[Exception | None]:
    """Run ``program`` on each rank and explore what it issued; return what each rank raised.

    ``Hung`` if its GPU would wait for ever. A wrong order and a failed check raise AssertionError.
    """
    machine = Machine(P, seeds=seeds, one_queue=one_queue)
    ranks = [Rank(machine, rank) for rank in range(P)]
    ended: dict[int, Exception | None] = {}

    def host(rank: Rank) -> None:
        rank.runs.acquire()
        try:
            program(rank)
            ended[rank.rank] = None
        except Exception as error:
            ended[rank.rank] = error
        except BaseException as error:  # pytest.fail, which also ends a pytest.raises in vain
            failed = AssertionError(f"rank {rank.rank}: {error}")
            ended[rank.rank] = failed.with_traceback(error.__traceback__)
        rank.paused.release()

    for rank in ranks:
        threading.Thread(target=host, args=(rank,), daemon=True).start()
        _take_turn(rank)
    while True:
        machine.explore()
        waiting = [rank for rank in ranks if rank.rank not in ended]
        hung = [rank for rank in ranks if not machine.drained(rank.streams)]
        if not waiting:
            break
        for rank in waiting:
            missing = [r for r in range(P) if r in ended or ranks[r] in hung]
            words = [other.said or ("", None) for other in ranks]
            rank.heard = RuntimeError(f"ranks {missing} did not come") if missing else words
            if rank in hung:
                rank.heard = Hung(f"rank {rank.rank}")
        for rank in waiting:
            _take_turn(rank)
    for rank in hung:
        ended[rank.rank] = ended[rank.rank] or Hung(f"rank {rank.rank}")
    for error in ended.values():
        if isinstance(error, AssertionError):
            raise error
    return [ended[rank] for rank in range(P)]


def _take_turn(rank: Rank) -> None:
    """Let the rank's host run until it meets the others or ends."""
    rank.runs.release()
    if not rank.paused.acquire(timeout=LAST_RESORT_S):
        raise TimeoutError(f"rank {rank.rank} neither met the others nor ended")
