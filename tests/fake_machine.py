"""GPUs as queues of operations, one queue per stream; every order of execution is explored.

With ``one_queue`` all streams of a GPU share a queue, as under ``CUDA_DEVICE_MAX_CONNECTIONS=1``:
each operation ends before the GPU begins the next one that its host has issued.

Hosts never read what a GPU has done, so they may run ahead of it. When ranks meet, all issued
operations are executed in every possible order, or in some random ones. A kernel or a copy is one
step: that it may run beside another is seen where both could be next. There is such a state, since
nothing waits for the beginning of a kernel, only for its end. The simulation detects

* reads of wrong data, and writes that may overlap a read or a write of the same bytes in time;
* access to memory that was unmapped, or reused too early;
* streams that wait for ever, flags that are not restored, illegal use of a capture.

It does not simulate bytes but rows: each holds a tag that names its contents.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

MOST_STATES = 400_000


class Wrong(AssertionError):
    """No order of streams may lead to this."""


class Row(NamedTuple):
    """A tensor's row: bytes ``start`` to ``end`` of some storage."""

    storage: int
    start: int
    end: int

    def overlaps(self, other: "Row") -> bool:
        same = self.storage == other.storage
        return same and self.start < other.end and other.start < self.end


class Op(NamedTuple):
    """An operation of a stream."""

    kind: str  # put, host (a put to a word of host memory), wait, after, kernel
    at: Any = None  # an address; a stream and a position in it
    value: int = 0
    reads: tuple[Row, ...] = ()
    writes: tuple[Row, ...] = ()
    run: Callable[[list[Any]], list[Any]] | None = None  # from tags that are read to those written

    def writes_over(self, *rows: Row) -> bool:
        return any(mine.overlaps(row) for mine in self.writes for row in rows)


class State(NamedTuple):
    done: tuple[int, ...]  # operations of each stream
    words: tuple[tuple[int, int], ...]  # address, value
    tags: frozenset[tuple[Row, Any]]


class Machine:
    """The GPUs of all ranks."""

    def __init__(self, P: int, *, seeds: int = 0, one_queue: bool = False) -> None:
        self.P = P
        self.seeds = seeds
        self.one_queue = one_queue
        self.queues: list[list[Op]] = []
        self.issued: list[list[int]] = [[] for _ in range(P)]  # by each rank: streams, in order
        self.states = {State((), (), frozenset())}
        self.host_words: dict[int, torch.Tensor] = {}  # of hosts, by address
        self._apart: set[Any] = set()  # pairs of kernels, each by stream and position
        self._last = 0

    def number(self) -> int:
        """Return a new storage, capture or address."""
        self._last += 1 << 20
        return self._last

    def add(self, rank: int, stream: int, ops: Sequence[Op]) -> None:
        """Issue operations on a rank's stream."""
        self.queues[stream].extend(ops)
        self.issued[rank].extend([stream] * len(ops))

    def explore(self) -> None:
        """Execute what was issued in every order, or in random ones; keep the final states."""
        todo = [self._extended(state) for state in self.states]
        if self.seeds:
            runs = itertools.product(todo, range(self.seeds))
            self.states = {self._run_randomly(random.Random(seed), state) for state, seed in runs}
            return
        seen = set(todo)
        ends = set()
        while todo:
            state = todo.pop()
            following = list(self._steps(state))
            if not following:
                ends.add(state)
            for new in following:
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
            assert len(seen) < MOST_STATES, "too many to explore: use random orders instead"
        self.states = ends

    def _run_randomly(self, chance: random.Random, state: State) -> State:
        while True:
            following = list(self._steps(state, chance))
            if not following:
                return state
            state = following[0]

    def _extended(self, state: State) -> State:
        new = (0,) * (len(self.queues) - len(state.done))
        return state._replace(done=state.done + new)

    def _steps(self, state: State, chance: random.Random | None = None) -> Iterator[State]:
        words = dict(state.words)
        ready = [
            i for i in self._next(state) if self._ready(self.queues[i][state.done[i]], state, words)
        ]
        if chance is not None:
            chance.shuffle(ready)
        for i in ready:
            # An event stays, and no stream reads host memory: these two can run at once.
            if self.queues[i][state.done[i]].kind in ("after", "host"):
                yield self._step(i, state, words)
                return
        self._check_alone([(i, state.done[i]) for i in ready])
        for i in ready:
            yield self._step(i, state, words)

    def _next(self, state: State) -> list[int]:
        """Return the streams that have an operation which is not behind another in its queue."""
        if not self.one_queue:
            return [i for i, n in enumerate(state.done) if n < len(self.queues[i])]
        done = [sum(state.done[i] for i in set(streams)) for streams in self.issued]
        return [streams[n] for streams, n in zip(self.issued, done, strict=True) if streams[n:]]

    def _ready(self, op: Op, state: State, words: dict[int, int]) -> bool:
        if op.kind == "after":
            stream, n = op.at
            return state.done[stream] >= n
        return op.kind != "wait" or words.get(op.at, 0) == op.value

    def _step(self, i: int, state: State, words: dict[int, int]) -> State:
        op = self.queues[i][state.done[i]]
        done = (*state.done[:i], state.done[i] + 1, *state.done[i + 1 :])
        if op.kind in ("put", "host"):
            changed = tuple(sorted({**words, op.at: op.value}.items()))
            return State(done, changed, state.tags)
        if op.kind == "kernel":
            tags = dict(state.tags)
            assert op.run is not None
            written = {row.storage for row in op.writes}
            found = op.run([tags.get(row, "garbage") for row in op.reads])
            for row in [old for old in tags if old.storage in written and op.writes_over(old)]:
                del tags[row]
            tags.update(zip(op.writes, found, strict=True))
            return State(done, state.words, frozenset(tags.items()))
        return State(done, state.words, state.tags)

    def _check_alone(self, ready: list[tuple[int, int]]) -> None:
        """Fail if one of these next operations may not run beside another of them."""
        kernels = [at for at in ready if self.queues[at[0]][at[1]].kind == "kernel"]
        for pair in itertools.combinations(kernels, 2):
            if pair not in self._apart:
                one, other = (self.queues[i][n] for i, n in pair)
                if one.writes_over(*other.reads, *other.writes) or other.writes_over(*one.reads):
                    raise Wrong(f"{one} of stream {pair[0][0]} runs beside {other}")
                self._apart.add(pair)

    def drained(self, streams: list[int]) -> bool:
        states = map(self._extended, self.states)
        return all(state.done[i] == len(self.queues[i]) for state in states for i in streams)

    def word(self, address: int) -> int:
        """Return the value at an address, which must be the same in every order."""
        (value,) = {dict(state.words).get(address, 0) for state in self.states}
        return value

    def show_host_words(self) -> None:
        """Copy what GPUs wrote to the words of host memory."""
        for address, word in self.host_words.items():
            word.fill_(self.word(address))
