"""A fake of CUDA for the real PeerMemory, on the queues of fake_machine.py.

Rows of its tensors hold tags instead of numbers, and its allocator reuses memory as soon as no
tensor holds it. Each object belongs to a rank of fake_ranks.py.
"""

from typing import TYPE_CHECKING, Any

import torch

from tests.fake_machine import Op, Row, Wrong

if TYPE_CHECKING:
    from tests.fake_ranks import Rank


class Stream:
    def __init__(self, rank: "Rank") -> None:
        self.rank = rank
        self.id = len(rank.machine.queues)
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

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        event.wait(self)


class Event:
    stream: Stream
    n: int
    graph: "Graph | None"

    def record(self, stream: Stream) -> None:
        stream.rank.fault()
        self.stream = stream
        self.graph = stream._graph
        queues: Any = stream.rank.machine.queues if self.graph is None else self.graph.lists
        self.n = len(queues[stream.id if self.graph is None else stream])

    def wait(self, stream: Stream) -> None:
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
        self.id = rank.machine.number()
        self.origin = origin
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
        begin = Event()
        begin.record(rank.current)
        branches = {stream: Stream(rank) for stream in self.lists}
        for branch in branches.values():
            begin.wait(branch)
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
        self.rank = rank
        self.nbytes = nbytes
        self.stream = rank.current
        self.used_by: list[Stream] = []
        free = rank.free.get((self.stream, nbytes), [])
        self.id = free.pop() if free and rank.graph is None else rank.machine.number()

    def __del__(self) -> None:
        if not self.used_by:  # else it is free when those streams are done, which no host knows
            self.rank.free.setdefault((self.stream, self.nbytes), []).append(self.id)


class FakeTensor:
    """Rows of a storage, with the operations that ``parallel/peers`` uses."""

    def __init__(
        self, rank: "Rank", storage: Any, start: int, shape: tuple[int, ...], dtype: torch.dtype,
        mapping: Mapping | None = None,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.storage = storage
        self.start = start
        self.mapping = mapping
        self.shape = torch.Size(shape)
        self.dtype = dtype
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

    def contiguous(self) -> "FakeTensor":
        return self

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> "FakeTensor":
        if isinstance(index, int):
            start = index * self.row_bytes
            shape = self.shape[1:]
        else:
            first, last, _ = index.indices(self.shape[0])
            start = first * self.row_bytes
            shape = torch.Size((last - first, *self.shape[1:]))
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
    def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """``torch.sum(shares, 0, out=out)``."""
        assert func is torch.sum and args[1:] == (0,) and kwargs.keys() == {"out"}
        shares = args[0]
        P, n = shares.shape[:2]
        out = shares.new_empty(*shares.shape[1:]) if kwargs["out"] is None else kwargs["out"]

        def add(tags: list[Any]) -> list[Any]:
            return ["+".join(sorted(map(str, tags[i::n]))) for i in range(n)]

        every = [shares[rank] for rank in range(P)]
        out.rank.launch(every, [out], add)
        return out

    def check_mapped(self) -> None:
        if self.mapping is not None and not self.mapping.is_mapped:
            raise Wrong("illegal memory access: a block that is no longer mapped")


class FakeBlock:
    """``peers.driver.Block``."""

    def __init__(self, rank: "Rank", nbytes: int, numbers: list[int]) -> None:
        self.nbytes = nbytes
        self.in_graph = False
        self._rank = rank
        self._numbers = numbers
        self._mapping = Mapping()

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> FakeTensor:
        assert torch.Size(shape).numel() * dtype.itemsize <= self.nbytes
        return FakeTensor(self._rank, self._numbers[rank], 0, shape, dtype, self._mapping)

    def address(self, rank: int) -> int:
        return self._numbers[rank]

    def __del__(self) -> None:
        self._mapping.is_mapped = False  # torch waits for the GPU first
