"""A fake of CUDA for the real PeerMemory, on the queues of fake_machine.py.

It has streams, events, graphs, tensors whose rows hold tags instead of numbers, and an allocator
that reuses memory as soon as no tensor holds it. Ranks are threads; one runs at a time, until it
meets the others.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tests.fake_machine import Machine, Op, Row, Wrong

STUCK_S = 60  # a host that calls nothing for so many seconds hangs; a turn takes milliseconds


class Hung(RuntimeError):
    """This rank's GPU waits for ever; the watchdog would end its process."""


class Fault(RuntimeError):
    """A planted failure."""


class Stream:
    def __init__(self, rank: "Rank") -> None:
        self.rank, self.id = rank, len(rank.machine.queues)
        rank.machine.queues.append([])
        rank.streams.append(self.id)

    @property
    def _graph(self) -> "Graph | None":
        graph = self.rank.graph
        return graph if graph is not None and self in graph.lists else None

    def add(self, *ops: Op) -> None:
        graph = self._graph
        if graph is None:
            self.rank.machine.add(self.rank.rank, self.id, ops)
            return
        graph.lists[self].extend(ops)
        graph.issued.extend([self] * len(ops))

    def record_event(self) -> "Event":
        self.rank.fault()
        graph = self._graph
        n = len(self.rank.machine.queues[self.id] if graph is None else graph.lists[self])
        return Event(self, n, graph)

    def wait_stream(self, other: "Stream") -> None:
        other.record_event().make_wait(self)


class Event(NamedTuple):
    stream: Stream
    n: int
    graph: "Graph | None"

    def wait(self) -> None:
        self.make_wait(self.stream.rank.current)

    def make_wait(self, stream: Stream) -> None:
        stream.rank.fault()
        if self.graph is not None and stream._graph is None:
            if stream.rank.graph is not self.graph:
                raise Wrong("an event of a capture is waited for outside of it")
            self.graph.lists[stream] = []  # joins the capture
        if self.graph is not stream._graph:
            raise Wrong("a capture waits for what is not in it")
        stream.add(Op("after", (self.stream.id if self.graph is None else self.stream, self.n)))


class Graph:
    """Operations of the streams of a capture."""

    def __init__(self, rank: "Rank", origin: Stream) -> None:
        self.id, self.origin = rank.machine.number(), origin
        self.lists: dict[Stream, list[Op]] = {origin: []}
        self.issued: list[Stream] = []  # of each operation, in order
        self.tensors: list[FakeTensor] = []  # of the graph's own pool, and what it reads and writes

    def check_joined(self) -> None:
        joined = {op.at[0]: op.at[1] for op in self.lists[self.origin] if op.kind == "after"}
        for stream, ops in self.lists.items():
            real = [n for n, op in enumerate(ops, start=1) if op.kind != "after"]
            if stream is not self.origin and real and joined.get(stream, 0) < real[-1]:
                raise Wrong("a stream of the capture was not joined")

    def replay(self) -> None:
        rank = self.origin.rank
        for tensor in self.tensors:
            tensor.check_mapped()
        begin = rank.current.record_event()
        branches = {stream: Stream(rank) for stream in self.lists}
        for branch in branches.values():
            begin.make_wait(branch)
        following = {stream: iter(ops) for stream, ops in self.lists.items()}
        for stream in self.issued:
            op = next(following[stream])
            at = (branches[op.at[0]].id, op.at[1] + 1) if op.kind == "after" else op.at
            branches[stream].add(op._replace(at=at))
        for branch in branches.values():
            rank.current.wait_stream(branch)


class Mapping:
    """A block as one rank has mapped it."""

    is_mapped = True


class Storage:
    """Ordinary memory of a rank, reused on its stream as soon as no tensor holds it."""

    def __init__(self, rank: "Rank", nbytes: int) -> None:
        self.rank, self.nbytes, self.stream = rank, nbytes, rank.current
        self.used_by: list[Stream] = []
        free = rank.free.get((self.stream, nbytes), [])
        self.id = free.pop() if free and rank.graph is None else rank.machine.number()

    def __del__(self) -> None:
        if not self.used_by:  # else it is free when those streams are done, which no host knows
            self.rank.free.setdefault((self.stream, self.nbytes), []).append(self.id)


class FakeTensor:
    """Rows of a storage, with the operations that peer_memory.py and peer_copies.py use."""

    def __init__(
        self, rank: "Rank", storage: Any, start: int, shape: tuple[int, ...], dtype: torch.dtype,
        mapping: Mapping | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.storage, self.start, self.mapping = rank, storage, start, mapping
        self.shape, self.dtype = torch.Size(shape), dtype
        self.row_bytes = self.shape[1:].numel() * dtype.itemsize
        self.itemsize, self.nbytes = dtype.itemsize, self.shape.numel() * dtype.itemsize

    @property
    def rows(self) -> tuple[Row, ...]:
        number = self.storage.id if isinstance(self.storage, Storage) else self.storage
        starts = [self.start + i * self.row_bytes for i in range(self.shape[0])]
        return tuple(Row(number, start, start + self.row_bytes) for start in starts)

    def new_empty(self, *shape: Any, dtype: torch.dtype | None = None) -> "FakeTensor":
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        return self.rank.empty(tuple(shape), dtype or self.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> "FakeTensor":
        if isinstance(index, int):
            start, shape = index * self.row_bytes, self.shape[1:]
        else:
            first, last, _ = index.indices(self.shape[0])
            start, shape = first * self.row_bytes, torch.Size((last - first, *self.shape[1:]))
        start += self.start
        return FakeTensor(self.rank, self.storage, start, tuple(shape), self.dtype, self.mapping)

    def __setitem__(self, row: int, value: int) -> None:
        """Set a row of flags, one by one."""
        for i in range(self.shape[1]):
            at = self.storage + self.start + row * self.row_bytes + 4 * i
            self.rank.current.add(Op("put", at, value))

    def copy_(self, source: "FakeTensor", non_blocking: bool = False) -> None:
        assert self.shape == source.shape and self.dtype == source.dtype
        self.rank.launch([source], [self], lambda tags: tags)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> None:
        """``torch.sum(shares, 0, out=out)``."""
        assert func is torch.sum and args[1:] == (0,)
        (shares, _), out = args, kwargs["out"]
        P, n = shares.shape[:2]

        def add(tags: list[Any]) -> list[Any]:
            return ["+".join(sorted(map(str, tags[i::n]))) for i in range(n)]

        every = [shares[rank] for rank in range(P)]
        out.rank.launch(every, [out], add)

    def check_mapped(self) -> None:
        if self.mapping is not None and not self.mapping.is_mapped:
            raise Wrong("illegal memory access: a block that is no longer mapped")


class FakeBlock:
    """``peer_driver.Block``."""

    def __init__(self, rank: "Rank", nbytes: int, numbers: list[int]) -> None:
        self.nbytes, self.in_graph = nbytes, False
        self._rank, self._numbers, self._mapping = rank, numbers, Mapping()

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> FakeTensor:
        assert torch.Size(shape).numel() * dtype.itemsize <= self.nbytes
        return FakeTensor(self._rank, self._numbers[rank], 0, shape, dtype, self._mapping)

    def address(self, rank: int) -> int:
        return self._numbers[rank]

    def __del__(self) -> None:
        self._mapping.is_mapped = False  # torch waits for the GPU first


class Rank:
    """One rank's host and GPU; also what PeerDriver is to PeerMemory."""

    limit_s = 10.0

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank, self.P, self.where = machine, rank, machine.P, f"rank {rank}"
        self.streams: list[int] = []
        self.free: dict[tuple[Stream, int], list[int]] = {}
        self.graph: Graph | None = None
        self.current = Stream(self)
        self._collectives = Stream(self), 0  # and how many were issued there
        self.faults_in = -1
        self.calls = 0
        self._words: list[torch.Tensor] = []
        self.said: str | None = None
        self.heard: list[str] | Exception = []
        self.runs, self.paused = threading.Semaphore(0), threading.Semaphore(0)

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

    # --- what PeerDriver has

    def current_stream(self) -> Stream:
        return self.current

    def side_stream(self) -> Stream:
        return Stream(self)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def capture(self) -> int:
        return 0 if self.current._graph is None else self.current._graph.id

    def shared(self, nbytes: int) -> FakeBlock:
        number = self.machine.number()
        return FakeBlock(self, nbytes, [int(word) for word in self.meet(str(number))])

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

    def enqueue(self, operations: list[Op], stream: Stream) -> None:
        self.fault()
        stream.add(*operations)

    def meet(self, message: str) -> list[str]:
        self.said = message
        self.paused.release()
        self.runs.acquire()
        self.said = None
        if isinstance(self.heard, Exception):
            raise self.heard
        return self.heard

    def snapshot(self, x: FakeTensor, out: torch.Tensor) -> bool:
        base = x.storage + x.start
        out.copy_(torch.tensor([self.machine.word(base + 4 * i) for i in range(len(out))]))
        return True

    # --- what tests do

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
        self.current.add(
            Op("begin", reads=rows[0], writes=rows[1]),
            Op("end", reads=rows[0], writes=rows[1], run=run),
        )

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


def run(
    P: int, program: Callable[[Rank], None], *, seeds: int = 0, one_queue: bool = False
) -> list[Exception | None]:
    """Run ``program`` on each rank and explore what it issued; return what each rank raised.

    A rank whose GPU would wait for ever ends with ``Hung``.

    Raises:
        AssertionError: something is wrong in an order of execution, or a check of a rank failed.
        TimeoutError: a rank's host hangs; the message has its stack.
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

    threads = [threading.Thread(target=host, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for rank in ranks:
        _take_turn(rank, threads[rank.rank])
    while True:
        machine.explore()
        waiting = [rank for rank in ranks if rank.rank not in ended]
        hung = [rank for rank in ranks if not machine.drained(rank.streams)]
        if not waiting:
            break
        for rank in waiting:
            missing = [r for r in range(P) if r in ended or ranks[r] in hung]
            words = [other.said or "" for other in ranks]
            rank.heard = RuntimeError(f"ranks {missing} did not come") if missing else words
            if rank in hung:
                rank.heard = Hung(f"rank {rank.rank}")
        for rank in waiting:
            _take_turn(rank, threads[rank.rank])
    for rank in hung:
        ended[rank.rank] = ended[rank.rank] or Hung(f"rank {rank.rank}")
    for error in ended.values():
        if isinstance(error, AssertionError):
            raise error
    return [ended[rank] for rank in range(P)]


def _take_turn(rank: Rank, host: threading.Thread) -> None:
    """Let the rank's host run until it meets the others or ends."""
    rank.runs.release()
    calls, idle_s = rank.calls, 0
    while not rank.paused.acquire(timeout=1.0):
        idle_s = idle_s + 1 if rank.calls == calls else 0
        calls = rank.calls
        if idle_s >= STUCK_S:
            stack = "".join(traceback.format_stack(sys._current_frames()[host.ident or 0]))
            raise TimeoutError(f"rank {rank.rank} has called nothing for {idle_s} s, in\n{stack}")
