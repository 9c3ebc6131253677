"""Programs of the ranks of fake_ranks.py that use the real PeerMemory; right in every order."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from flce_dist.parallel.peers.copies import PeerGather, PeerScatter
from flce_dist.parallel.peers.memory import PeerMemory
from tests.fake_cuda import FakeTensor, Graph, Storage, Stream
from tests.fake_ranks import Fault, Rank

ROWS = 2  # of each rank


def memory_of(rank: Rank) -> PeerMemory:
    driver: Any = rank
    return PeerMemory(driver, "tokens")


def gather(
    rank: Rank, memory: PeerMemory, turn: Any, wide: int = 1, *, beside: bool = False
) -> FakeTensor:
    """Gather tokens of ``wide`` elements, and check them."""
    x: Any = FakeTensor(rank, Storage(rank, ROWS * wide * 4), 0, (ROWS, wide), torch.float32)
    with rank.outside_the_call():
        rank.fill(x, [(turn, rank.rank, k) for k in range(ROWS)])
    gathered = PeerGather(x, memory)
    gathered.start(beside=beside)
    tokens: Any = gathered.wait()
    rank.expect(tokens, [(turn, r, k) for r in range(rank.P) for k in range(ROWS)])
    return tokens


gather_beside = partial(gather, beside=True)


def scatter(rank: Rank, memory: PeerMemory, turn: Any, *, chunks: int = 1) -> None:
    """Sum all tokens over ranks, written in one chunk or two."""
    T = ROWS * rank.P
    total = PeerScatter((T, 1), torch.float32, memory)
    tokens: Any = total.tokens
    tags = [(turn, rank.rank, t) for t in range(T)]
    for first in range(0, T, T // chunks):
        total.acquire()
        chunk = slice(first, first + T // chunks)
        rank.fill(tokens[chunk], tags[chunk])
    total.start()
    out: Any = total.wait()
    mine = range(ROWS * rank.rank, ROWS * (rank.rank + 1))
    rank.expect(out, ["+".join(str((turn, r, t)) for r in range(rank.P)) for t in mine])


Use = Callable[[Rank, PeerMemory, Any], Any]


def own_stream(rank: Rank) -> Any:
    """Return a context whose current stream waits for nothing issued before."""
    return rank.on(Stream(rank))


def turns(rank: Rank, uses: Sequence[Use] = (gather, gather), streams: bool = False) -> None:
    """Uses that follow each other, each on a stream of its own if ``streams``."""
    memory = memory_of(rank)
    for turn, use in enumerate(uses):
        with own_stream(rank) if streams else nullcontext():
            use(rank, memory, turn)


def training(rank: Rank) -> None:
    """What two steps issue under sequence parallelism: copies, with collectives between them."""
    hidden = memory_of(rank)
    dhidden = memory_of(rank)
    for turn in range(2):
        gather(rank, hidden, (turn, "forward"))
        for _ in range(3):
            rank.all_reduce()
        gather(rank, hidden, (turn, "backward"))
        scatter(rank, dhidden, turn)


def sections(rank: Rank) -> None:
    """What a call in sections issues: the next gather begins, and the last sum ends, in between."""
    hidden = memory_of(rank)
    dhidden = memory_of(rank)
    T = ROWS * rank.P
    result = rank.empty((3 * ROWS, 1), torch.float32)

    def begun(turn: int) -> PeerGather:
        x: Any = FakeTensor(rank, Storage(rank, ROWS * 4), 0, (ROWS, 1), torch.float32)
        with rank.outside_the_call():
            rank.fill(x, [(turn, rank.rank, k) for k in range(ROWS)])
        gather = PeerGather(x, hidden)
        gather.start(beside=turn > 0)
        return gather

    upcoming = begun(0)
    last: PeerScatter | None = None
    for turn in range(3):
        tokens: Any = upcoming.wait()
        rank.all_reduce()
        rank.expect(tokens, [(turn, r, k) for r in range(rank.P) for k in range(ROWS)])
        if turn < 2:
            upcoming = begun(turn + 1)
        if last is not None:
            last.wait()
        out: Any = result[ROWS * turn : ROWS * (turn + 1)]
        last = PeerScatter((T, 1), torch.float32, dhidden, out)
        last.acquire()
        share: Any = last.tokens
        rank.fill(share, [(turn, rank.rank, t) for t in range(T)])
        last.start()
    assert last is not None
    last.wait()
    mine = range(ROWS * rank.rank, ROWS * (rank.rank + 1))
    sums = ["+".join(str((turn, r, t)) for r in range(rank.P)) for turn in range(3) for t in mine]
    rank.expect(result, sums)


def captured(rank: Rank, memory: PeerMemory, turn: Any = "graph", use: Any = gather) -> Graph:
    with own_stream(rank), rank.capturing() as graph:
        use(rank, memory, turn)
    return graph


def graph(rank: Rank, use: Any = gather) -> None:
    """Captured, two larger calls, replayed; memory released, a call, replayed again."""
    memory = memory_of(rank)
    use(rank, memory, 0)
    one = captured(rank, memory, use=use)
    small = memory.nbytes
    for turn, wide in ((1, 1 << 20), (2, 1 << 21)):
        use(rank, memory, turn, wide)
    assert small < memory.nbytes
    one.replay()
    memory.release()
    assert memory.nbytes == small
    use(rank, memory, 3)
    one.replay()


def graph_of_one_rank(rank: Rank) -> None:
    """One rank makes no capture, the others do; still all keep the same blocks."""
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


def graph_of_two_streams(rank: Rank) -> None:
    """Two uses in one graph; on rank 0 they are on streams that do not wait for each other."""
    memory = memory_of(rank)
    gather(rank, memory, 0)
    with own_stream(rank), rank.capturing() as one:
        other = rank.current if rank.rank else Stream(rank)
        other.wait_stream(rank.current)  # joins the capture
        with rank.on(other):
            gather(rank, memory, 1)
        gather(rank, memory, 2)
        rank.current.wait_stream(other)
    one.replay()


def failed_capture(
    rank: Rank, at: int = 3, use: Use = gather, who: Sequence[int] = range(8)
) -> None:
    """A capture fails at some step on these ranks, the others make none; eager calls follow."""
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
    """Let one of the calls in this block raise, and continue after the block."""
    rank.faults_in = at
    try:
        yield
    except Fault as fault:
        traceback.clear_frames(fault.__traceback__)  # Python 3.12 keeps their tensors for longer
    rank.faults_in = -1


def new_owners(rank: Rank) -> None:
    """Allocate the memory that is free on the current stream, and fill it."""
    for n in (ROWS, ROWS * rank.P):
        for i in range(2):
            mine = [("another's", i, k) for k in range(n)]
            rank.expect(rank.fill(rank.empty((n, 1)), mine), mine)


def exception(rank: Rank, at: int = 9, use: Use = gather, who: Sequence[int] = range(8)) -> None:
    """These ranks raise at the same place, drop all tensors, and call again."""
    memory = memory_of(rank)
    use(rank, memory, 1)
    with failing(rank, at if rank.rank in who else -1):
        use(rank, memory, 2)
    new_owners(rank)
    use(rank, memory, 3)


SCENARIOS: dict[str, Callable[[Rank], None]] = {
    "turns": turns,
    "sums": partial(turns, uses=(scatter, gather)),
    "beside": partial(turns, uses=(gather_beside, gather, gather_beside, gather_beside)),
    "two_streams_beside": partial(turns, uses=(gather_beside, gather), streams=True),
    "graph_beside": partial(graph, use=gather_beside),
    "chunks": partial(turns, uses=(partial(scatter, chunks=2), scatter)),
    "two_streams": partial(turns, streams=True),
    "two_streams_of_sums": partial(turns, uses=(scatter, gather), streams=True),
    **{
        program.__name__: program
        for program in (
            training, sections, graph, graph_of_one_rank, graph_of_sums, graph_of_two_streams,
            failed_capture, exception,
        )
    },
}  # fmt: skip
