"""Peers' memory on GPUs that are queues (fake_cuda.py), in every order of their streams."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch

from flce_dist import peer_groups, peer_memory, peer_watch
from flce_dist.peer_copies import PeerGather, PeerScatter
from flce_dist.peer_memory import PeerMemory
from flce_dist.token_order import TokenOrder
from tests import fake_cuda
from tests.fake_cuda import FakeTensor, Fault, Graph, Hung, Rank, Storage, Stream


@pytest.fixture(autouse=True)
def no_thread_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "watch", lambda wait: None)


ROWS = 2  # of each rank, one in each piece


def memory_of(rank: Rank) -> PeerMemory:
    driver: Any = rank
    return PeerMemory(driver, "tokens")


def order_of(P: int) -> TokenOrder:
    return TokenOrder(P, ((0, P), (P, ROWS * P)))


def gather(rank: Rank, memory: PeerMemory, turn: Any, wide: int = 1) -> FakeTensor:
    """Tokens of ``wide`` elements, looked at piece by piece as they arrive."""
    x = FakeTensor(rank, Storage(rank, ROWS * wide * 4), 0, (ROWS, wide), torch.float32)
    return gather_of(rank, memory, x, turn)


def gather_of(rank: Rank, memory: PeerMemory, x: Any, turn: Any) -> FakeTensor:
    def write(own: Any) -> None:
        rank.fill(own, [(turn, rank.rank, k) for k in range(ROWS)])

    one = PeerGather(x, order_of(rank.P), memory, write)
    tokens: Any = one.tokens
    for piece, (start, end) in enumerate(order_of(rank.P).pieces):
        one.wait(piece)
        rank.expect(tokens[start:end], [(turn, r, piece) for r in range(rank.P)])
    return tokens


def sum_rows(own: Any, others: Any, rank: int, scale: Any, *, out: Any) -> None:
    out.rank.launch([own, others], [out], lambda tags: ["+".join(sorted(map(str, tags)))])


def scatter(
    rank: Rank, memory: PeerMemory, turn: Any, *, chunks: int = 1, wide: bool = True
) -> None:
    """Shares of all tokens, in one chunk or a piece at a time; with an accumulator if not wide."""
    T, order = ROWS * rank.P, order_of(rank.P)
    dtype = torch.float32 if wide else torch.bfloat16
    total = PeerScatter((T, 1), dtype, order, memory, sum_rows, accumulates=not wide)
    tokens: Any = total.tokens
    tags = [(turn, rank.rank, t) for t in range(T)]
    for first, last in [(0, T)] if chunks == 1 else order.pieces:
        total.acquire()
        share = tokens[first:last]
        if wide:
            rank.fill(share, tags[first:last])
        else:
            acc: Any = total.accumulator(T, torch.float32)
            rank.fill(acc, tags)
            for block in total.blocks(T):
                rank.launch([acc[block]], [share[block]], lambda tags: tags)
        total.start(first, last)
    out: Any = total.wait()
    mine = [t for piece in range(2) for t in range(T)[order.part(piece, rank.rank)]]
    rank.expect(out, ["+".join(str((turn, r, t)) for r in range(rank.P)) for t in mine])


Use = Callable[[Rank, PeerMemory, Any], Any]


def own_stream(rank: Rank) -> Any:
    """A block on a stream that waits for nothing issued before."""
    return rank.on(Stream(rank))


# --- what must be right, whatever the order


def turns(rank: Rank) -> None:
    memory = memory_of(rank)
    gather(rank, memory, 1)
    gather(rank, memory, 2)


def sums(rank: Rank) -> None:
    memory = memory_of(rank)
    scatter(rank, memory, 1)
    gather(rank, memory, 2)


def chunks(rank: Rank) -> None:
    memory = memory_of(rank)
    scatter(rank, memory, 1, chunks=2)
    scatter(rank, memory, 2, wide=False)


def two_streams(rank: Rank) -> None:
    memory = memory_of(rank)
    with own_stream(rank):
        gather(rank, memory, 1)
    with own_stream(rank):
        gather(rank, memory, 2)


def two_streams_of_sums(rank: Rank) -> None:
    memory = memory_of(rank)
    with own_stream(rank):
        scatter(rank, memory, 1)
    with own_stream(rank):
        gather(rank, memory, 2)


def captured(rank: Rank, memory: PeerMemory, turn: Any = "graph") -> Graph:
    with own_stream(rank), rank.capturing() as graph:
        gather(rank, memory, turn)
    return graph


def graph(rank: Rank) -> None:
    """Captured, two larger calls, replayed; memory released, a call, replayed again."""
    memory = memory_of(rank)
    gather(rank, memory, 0)
    one = captured(rank, memory)
    small = memory.nbytes
    for turn, wide in ((1, 1 << 20), (2, 1 << 21)):
        gather(rank, memory, turn, wide)
    assert small < memory.nbytes
    one.replay()
    memory.release()
    assert memory.nbytes == small
    gather(rank, memory, 3)
    one.replay()


def graph_of_one_rank(rank: Rank) -> None:
    """One rank cannot even begin a capture that others make: still all keep the same blocks."""
    memory = memory_of(rank)
    gather(rank, memory, 0)
    if rank.rank:
        captured(rank, memory)
    memory.release()
    gather(rank, memory, 1)
    gather(rank, memory, 2, 1 << 20)
    memory.release()
    gather(rank, memory, 3)


def graph_of_sums(rank: Rank) -> None:
    """Several uses in one graph."""
    memory = memory_of(rank)
    scatter(rank, memory, 0)
    with own_stream(rank), rank.capturing() as one:
        scatter(rank, memory, 1)
        gather(rank, memory, 2)
    one.replay()
    gather(rank, memory, 3)


def failed_capture(
    rank: Rank, at: int = 5, use: Use = gather, who: Sequence[int] = range(8)
) -> None:
    """A capture fails somewhere on these ranks, the others make none; eager calls follow."""
    memory = memory_of(rank)
    use(rank, memory, 1)
    if rank.rank in who:
        with failing(rank, at), rank.capturing():
            use(rank, memory, 2)
    use(rank, memory, 3)
    with own_stream(rank), rank.capturing() as one:
        use(rank, memory, 4)
    one.replay()


@contextmanager
def failing(rank: Rank, at: int) -> Iterator[None]:
    """Let one of the calls in this block raise, and go on behind it."""
    rank.faults_in = at
    with suppress(Fault):
        yield
    rank.faults_in = -1


def new_owners(rank: Rank) -> None:
    """Take what memory is free on the current stream, and fill it."""
    for n in (ROWS, ROWS * rank.P):
        for i in range(2):
            mine = [("another's", i, k) for k in range(n)]
            rank.expect(rank.fill(rank.empty((n, 1)), mine), mine)


def exception(rank: Rank, at: int = 9, use: Use = gather, who: Sequence[int] = range(8)) -> None:
    """These ranks raise at the same place, let go of all, and call again."""
    memory = memory_of(rank)
    use(rank, memory, 1)
    with failing(rank, at if rank.rank in who else -1):
        use(rank, memory, 2)
    new_owners(rank)
    use(rank, memory, 3)


SCENARIOS: dict[str, Callable[[Rank], None]] = {
    program.__name__: program
    for program in (
        turns, sums, chunks, two_streams, two_streams_of_sums, graph, graph_of_one_rank,
        graph_of_sums, failed_capture, exception,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_order_of_two_ranks(name):
    assert fake_cuda.run(2, SCENARIOS[name]) == [None, None]


@pytest.mark.parametrize(("name", "P"), list(itertools.product(SCENARIOS, (3, 4))))
def test_many_orders_of_more_ranks(name, P):
    assert fake_cuda.run(P, SCENARIOS[name], seeds=3) == [None] * P


STEPS: dict[Use, int] = {gather: 22, scatter: 23}  # calls of CUDA in a use with one peer


def steps(uses: dict[Use, int]) -> list[tuple[Use, int]]:
    return [(use, at) for use, n in uses.items() for at in range(1, n + 1)]


def ids(value: Any) -> str:
    return getattr(value, "__name__", str(value))


def test_all_steps_are_tried():
    def count(rank: Rank) -> None:
        memory = memory_of(rank)
        for use, most in STEPS.items():
            use(rank, memory, 1)
            before = rank.calls
            use(rank, memory, 2)
            assert rank.calls - before == most

    assert fake_cuda.run(2, count) == [None, None]


@pytest.mark.parametrize(("use", "at"), steps(STEPS), ids=ids)
@pytest.mark.parametrize("who", [range(8), [1]], ids=["all", "one"])
def test_a_capture_that_fails_anywhere(use, at, who):
    def program(rank: Rank) -> None:
        failed_capture(rank, at, use, who)

    assert fake_cuda.run(2, program, seeds=2) == [None, None]


@pytest.mark.parametrize(("use", "at"), steps(STEPS), ids=ids)
def test_all_ranks_raise_anywhere_and_call_again(use, at):
    assert fake_cuda.run(3, lambda rank: exception(rank, at, use), seeds=2) == [None] * 3


@pytest.mark.parametrize(("use", "at"), steps(STEPS), ids=ids)
def test_one_rank_raises_anywhere_and_no_data_are_mixed(use, at):
    """It is told that the others did not come; they wait for it, which has a limit."""
    ended = fake_cuda.run(3, lambda rank: exception(rank, at, use, [1]), seeds=2)
    raised = isinstance(ended[1], RuntimeError)
    assert raised or ended == [None] * 3  # that step is behind the last
    assert not raised or (isinstance(ended[0], Hung) and isinstance(ended[2], Hung))


def test_a_capture_goes_on_after_a_call_that_raised():
    def program(rank: Rank) -> None:
        memory = memory_of(rank)
        gather(rank, memory, 1)
        with pytest.raises(RuntimeError, match="must not be replayed"), rank.capturing():
            with failing(rank, 6):
                gather(rank, memory, 2)
            gather(rank, memory, 3)
        with failing(rank, 6):
            gather(rank, memory, 4)
        with pytest.raises(RuntimeError, match="run the same call once"), rank.capturing():
            gather(rank, memory, 5)
        gather(rank, memory, 6)

    assert fake_cuda.run(2, program) == [None, None]


def test_ranks_that_do_not_want_the_same_are_told_so():
    def program(rank: Rank) -> None:
        memory = memory_of(rank)
        with pytest.raises(RuntimeError, match=r"rank 0 takes 8 bytes.*; rank 1 gives memory back"):
            gather(rank, memory, 1) if rank.rank == 0 else memory.release()

    assert fake_cuda.run(2, program) == [None, None]


# --- waits that last too long


def hung_gather(rank: Rank) -> PeerMemory:
    memory = memory_of(rank)
    gather(rank, memory, 1)
    if rank.rank:
        gather(rank, memory, 2)
    return memory


def hung_replay(rank: Rank) -> PeerMemory:
    memory = memory_of(rank)
    gather(rank, memory, 1)
    one = captured(rank, memory)
    one.replay()
    if rank.rank:
        one.replay()
    return memory


@pytest.mark.parametrize(
    ("program", "peers", "said"),
    [
        (hung_gather, 3, "rank 1 has waited 12 s for ranks [0] to publish tokens"),
        (hung_gather, 2, "rank 1 has waited 12 s for ranks [0] to publish tokens"),
        (hung_replay, 2, "rank 1 has waited 12 s for ranks [0] to publish tokens"),
    ],
)
def test_a_wait_without_end_is_noticed(program, peers, said):
    memories: dict[int, tuple[Rank, PeerMemory]] = {}

    def note(rank: Rank) -> None:
        memories[rank.rank] = rank, program(rank)

    ended = fake_cuda.run(peers, note, seeds=0 if peers == 2 else 5)
    assert [type(error) for error in ended] == [type(None), *[Hung] * (peers - 1)]
    rank, memory = memories[1]
    rank.machine.show_cells()
    for now, expected in ((0.0, []), (9.0, []), (12.0, [said])):
        assert [text for wait in memory._waits if (text := wait.overdue(now))] == expected
    assert not any(wait.overdue(now) for wait in memories[0][1]._waits for now in (0.0, 99.0))


def test_the_limit_is_that_of_one_wait():
    """Not of waits that follow each other, though a look may see each of them."""
    cells = torch.zeros(2, dtype=torch.int32)
    wait = peer_watch.Wait(cells, 10.0, lambda: ("rank 0", "rank 1"))
    for now in range(0, 100, 5):
        assert wait.overdue(now) is None
        cells[:] = 1  # passed one, waits again
    for now, said in ((100, None), (105, None), (111, "rank 0 has waited 11 s for rank 1")):
        assert wait.overdue(now) == said


def test_the_process_ends(monkeypatch, capsys):
    def abort() -> None:
        raise SystemExit

    wait = mock.Mock()
    wait.overdue.side_effect = [None, None, "rank 0 has waited for ever"]
    monkeypatch.setattr(peer_watch, "_watched", {wait})
    monkeypatch.setattr(peer_watch, "_POLL_S", 0.0)
    monkeypatch.setattr("os.abort", abort)
    with pytest.raises(SystemExit):
        peer_watch._look_on()
    assert capsys.readouterr().err == "flce_dist: rank 0 has waited for ever: this process ends\n"


# --- groups


def test_memories_go_with_their_group(monkeypatch):
    alive: set[Any] = set()
    size = mock.Mock(return_value=2)

    def ranks_of(group: Any) -> list[int]:
        return [0, 1] if group in alive else {}[group]

    def group_named(name: str) -> Any:
        group = mock.Mock(group_name=name)
        alive.add(group)
        return group

    monkeypatch.setattr(peer_groups, "_memories", {})
    monkeypatch.setattr(peer_groups, "_all_reach_all", lambda *_: True)
    monkeypatch.setattr(peer_groups, "PeerDriver", lambda *_: None)
    monkeypatch.setattr(peer_groups, "PeerMemory", lambda *_: mock.Mock(nbytes=1))
    monkeypatch.setattr("torch.distributed.get_world_size", size)
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", ranks_of)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    device = torch.device("cuda", 0)
    one, other = group_named("0"), group_named("1")
    first = peer_groups.of_group(one, device)
    assert first is not None and peer_groups.of_group(one, device) is first
    assert peer_groups.of_group(other, device) is not first and peer_groups.held_bytes() == 4
    alive.remove(one)
    assert peer_groups.held_bytes() == 2
    again = group_named("0")
    made: Any = peer_groups.of_group(again, device)
    assert made not in (None, first)
    alive.clear()
    peer_groups.release()
    assert not made.hidden.release.called and not peer_groups._memories


# --- planted mistakes

Plant = Callable[[pytest.MonkeyPatch], None]


def without(name: str) -> Plant:
    """A list of stream operations is empty."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        init = PeerMemory.__init__

        def wrong(self: Any, *args: Any) -> None:
            init(self, *args)
            setattr(self, name, [])

        patch.setattr(PeerMemory, "__init__", wrong)

    plant.__name__ = f"without{name}"
    return plant


def published_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    acquire, enqueue = PeerMemory.acquire, Rank.enqueue

    def early(self: Any) -> None:
        if not self._writable:
            acquire(self)
            enqueue(self._driver, self._tell_ready, self._driver.current_stream())

    def late(self: Any, operations: list[Any], stream: Any) -> None:
        told = [op for op in operations if op.kind == "put" and op.value]
        if not told or stream is not self.current or stream.id in self.streams[1:2]:
            enqueue(self, operations, stream)

    patch.setattr(PeerMemory, "acquire", early)
    patch.setattr(Rank, "enqueue", late)


def freed_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    enqueue = Rank.enqueue

    def early(self: Any, operations: list[Any], stream: Any) -> None:
        waited = [op for op in operations if op.kind == "wait"]
        enqueue(self, operations, stream)
        memory = self.memory
        if waited and stream is memory._stream:
            enqueue(self, memory._tell_free, stream)
            memory._tell_free, memory.told = [], memory._tell_free
        elif not operations:
            memory._tell_free = memory.told

    init = PeerMemory.__init__

    def note(self: Any, driver: Any, holds: str) -> None:
        init(self, driver, holds)
        driver.memory = self

    patch.setattr(PeerMemory, "__init__", note)
    patch.setattr(Rank, "enqueue", early)


def use_left_open_to_the_next(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerMemory, "close", lambda self: setattr(self, "_capture", None))


def copies_without_the_current_stream(patch: pytest.MonkeyPatch) -> None:
    real = Stream.wait_stream

    def wrong(self: Any, other: Any) -> None:
        if self is self.rank.current:
            real(self, other)

    patch.setattr(Stream, "wait_stream", wrong)


def arrivals_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(peer_memory.Arrival, "wait", lambda self: self._outs.clear())


def memory_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rank, "keep", lambda *_: None)


def blocks_of_graphs_dropped(patch: pytest.MonkeyPatch) -> None:
    block = property(lambda self: False, lambda self, value: None)
    patch.setattr(fake_cuda.FakeBlock, "in_graph", block, raising=False)


def blocks_of_own_graphs_alone(patch: pytest.MonkeyPatch) -> None:
    def meet(self: Any, what: str) -> None:
        self._driver.meet(what)

    patch.setattr(PeerMemory, "_meet", meet)


def exceptions_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerMemory, "_after_exception", lambda self, capture: None)


def writable_since_the_failed_capture(patch: pytest.MonkeyPatch) -> None:
    real = PeerMemory.open

    def wrong(self: Any, nbytes: int) -> None:
        writable = self._capture is not None and self._writable
        real(self, nbytes)
        self._writable = writable

    patch.setattr(PeerMemory, "open", wrong)


def of_one_rank(rank: Rank) -> None:
    exception(rank, 3, gather, [1])


@pytest.mark.parametrize(
    ("plant", "program"),
    [
        (without("_await_free"), turns),
        (without("_await_ready"), turns),
        (without("_tell_ready"), turns),
        (without("_tell_free"), turns),
        (published_before_it_is_written, turns),
        (freed_before_it_is_read, turns),
        (use_left_open_to_the_next, two_streams),
        (use_left_open_to_the_next, two_streams_of_sums),
        (copies_without_the_current_stream, turns),
        (arrivals_not_awaited, turns),
        (arrivals_not_awaited, sums),
        (memory_not_kept, functools.partial(exception, at=18)),
        (blocks_of_graphs_dropped, graph),
        (blocks_of_own_graphs_alone, graph_of_one_rank),
        (exceptions_forgotten, functools.partial(exception, at=5)),
        (exceptions_forgotten, of_one_rank),
        (writable_since_the_failed_capture, functools.partial(failed_capture, at=3)),
    ],
    ids=ids,
)
def test_a_mistake_is_found(plant, program, monkeypatch):
    plant(monkeypatch)
    try:
        ended = fake_cuda.run(2, program)
    except AssertionError:
        return
    if program is of_one_rank:
        assert not isinstance(ended[1], RuntimeError)
    else:
        assert ended != [None, None]
