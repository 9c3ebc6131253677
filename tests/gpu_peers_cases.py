"""What two processes on one GPU do with PeerMemory: see gpu_peers_one_device.py, which runs it.

Each case runs on both ranks and yields what is wrong there. P ranks, T tokens, H hidden size.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.parallel import transport
from flce_dist.parallel.peer_copies import PeerGather, PeerScatter
from flce_dist.parallel.peer_driver import PeerDriver
from flce_dist.parallel.peer_memory import PeerMemory
from flce_dist.parallel.token_order import TokenOrder

P = 2
H = 64
LIMIT_S = 60.0  # of waits, where nothing should hang
SHORT_S = 6.0  # where something does
LATE = 200_000_000  # cycles: 0.1 s


def join(rank: int, path: str) -> None:
    """Make the default group, over gloo."""
    timeout = timedelta(seconds=LIMIT_S)
    dist.init_process_group(
        "gloo", store=dist.FileStore(path, P), rank=rank, world_size=P, timeout=timeout
    )


@dataclass
class Rank:
    """One process of a case."""

    group: dist.ProcessGroup
    device: torch.device
    limit_s: float

    @property
    def rank(self) -> int:
        return self.group.rank()

    def memory(self, kind: Any = PeerMemory) -> Any:
        driver = PeerDriver(self.group, self.device)
        driver.limit_s = self.limit_s
        return kind(driver, "tokens")

    def tokens(self, turn: int, n: int) -> Tensor:
        return self.of(self.rank, turn, n)

    def of(self, rank: int, turn: int, n: int) -> Tensor:
        """What a rank sends in a turn, [n, H], no two numbers alike."""
        values = torch.arange(n * H, device=self.device, dtype=torch.float32).view(n, H)
        return values + (1000 * turn + rank) * 10_000


def order_of(n: int) -> TokenOrder:
    """Two pieces, the first one small."""
    return TokenOrder(P, ((0, P * (n // 4)), (P * (n // 4), P * n)))


def expected(me: Rank, turn: int, n: int) -> Tensor:
    order, out = order_of(n), torch.empty(P * n, H, device=me.device)
    for piece in range(2):
        for rank in range(P):
            out[order.part(piece, rank)] = me.of(rank, turn, n)[order.local(piece)]
    return out


def gather(me: Rank, memory: PeerMemory, x: Tensor) -> Tensor:
    return PeerGather(x, order_of(len(x)), memory).wait_all()


def scatter(me: Rank, memory: PeerMemory, shares: Tensor) -> Tensor:
    T = len(shares)
    total = PeerScatter((T, H), torch.float32, order_of(T // P), memory)
    total.acquire()
    total.tokens.copy_(shares)
    total.start(0, T)
    return total.wait()


def shares(me: Rank, rank: int, turn: int, T: int) -> Tensor:
    return me.of(rank, turn, T)


def expected_sum(me: Rank, turn: int, T: int) -> Tensor:
    order, out = order_of(T // P), torch.empty(T // P, H, device=me.device)
    for piece in range(2):
        out[order.local(piece)] = sum(
            shares(me, rank, turn, T)[order.part(piece, me.rank)] for rank in range(P)
        )
    return out


def differs(what: str, found: Tensor, right: Tensor) -> Iterator[str]:
    torch.cuda.synchronize()
    wrong = int((found != right).sum())
    if wrong:
        yield f"{what}: {wrong} of {right.numel()} numbers are wrong"


def check_gather(me: Rank, memory: PeerMemory, what: str, turn: int, n: int) -> Iterator[str]:
    yield from differs(what, gather(me, memory, me.tokens(turn, n)), expected(me, turn, n))


def delay(stream: Any) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE)


# --- cases


def eager(me: Rank) -> Iterator[str]:
    """Gathers and sums of several sizes, back to back."""
    memory, results = me.memory(), []
    for turn in range(4):
        n = 64 << (turn % 3)
        results.append((gather(me, memory, me.tokens(turn, n)), expected(me, turn, n)))
        own = shares(me, me.rank, turn, P * n)
        results.append((scatter(me, memory, own), expected_sum(me, turn, P * n)))
    for i, (found, right) in enumerate(results):
        yield from differs(f"turn {i // 2}, {('gather', 'sum')[i % 2]}", found, right)


def captured(me: Rank, memory: PeerMemory, n: int) -> tuple[Any, list[Tensor], list[Tensor]]:
    """A graph of a gather and a sum: ``(graph, inputs, results)``."""
    inputs = [me.tokens(0, n).clone(), shares(me, me.rank, 0, P * n).clone()]

    def step() -> list[Tensor]:
        return [gather(me, memory, inputs[0]), scatter(me, memory, inputs[1])]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step()
    return graph, inputs, results


def check_replay(me: Rank, of: tuple[Any, list[Tensor], list[Tensor]], turn: int) -> Iterator[str]:
    graph, (x, own), results = of
    x.copy_(me.tokens(turn, len(x)))
    own.copy_(shares(me, me.rank, turn, len(own)))
    graph.replay()
    right = [expected(me, turn, len(x)), expected_sum(me, turn, len(own))]
    for name, found, wanted in zip(("gather", "sum"), results, right, strict=True):
        yield from differs(f"replay {turn}, {name}", found, wanted)


def graph(me: Rank) -> Iterator[str]:
    """A graph is replayed after eager calls that needed more memory, twice, and a release."""
    memory = me.memory()
    one = captured(me, memory, 64)
    yield from check_replay(me, one, 1)
    before = memory.nbytes
    for turn, n in ((2, 40_000), (3, 90_000)):
        yield from check_gather(me, memory, f"eager gather of {n}", turn, n)
    if not before < memory.nbytes:
        yield f"{before} bytes before, {memory.nbytes} after larger calls"
    yield from check_replay(me, one, 4)
    memory.release()
    if memory.nbytes != before:
        yield f"{memory.nbytes} bytes are left after release, not {before}"
    spoil = [torch.full((1 << 24,), torch.nan, device=me.device) for _ in range(4)]
    yield from check_replay(me, one, 5)
    del spoil
    yield from check_gather(me, memory, "eager gather after release", 6, 40_000)
    yield from check_replay(me, one, 7)


class Stop(Exception):
    """What these cases raise in the middle of a call."""


def stopped_gather(x: Tensor, order: TokenOrder, memory: PeerMemory) -> None:
    """Raise after the memory was acquired and before anything is published."""
    with mock.patch.object(memory, "pull", side_effect=Stop):
        PeerGather(x, order, memory).wait_all()


def failed_capture(me: Rank) -> Iterator[str]:
    """A capture fails between acquire and publish; the eager call after it waits for its peer."""
    memory, n = me.memory(), 4000
    yield from check_gather(me, memory, "before", 0, n)
    dist.barrier(me.group)
    if me.rank == 1:
        delay(memory._stream)  # copies late what rank 0 published
    slow = gather(me, memory, me.tokens(1, n))
    if me.rank == 0:
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                stopped_gather(me.tokens(2, n), order_of(n), memory)
        except Exception as error:
            print(f"the capture failed as planned: {type(error).__name__}: {error}")
        else:
            yield "the capture did not fail"
    after = gather(me, memory, me.tokens(3, n))
    yield from differs("in flight during the capture", slow, expected(me, 1, n))
    yield from differs("after the capture", after, expected(me, 3, n))
    yield from check_replay(me, captured(me, memory, n), 4)


def exception(me: Rank) -> Iterator[str]:
    """All ranks raise with copies in flight, or before they publish: nothing is harmed."""
    memory, n = me.memory(), 4000
    yield from check_gather(me, memory, "before", 0, n)
    delay(memory._stream)
    one = PeerGather(me.tokens(1, n), order_of(n), memory)
    one.start(0)
    address = one.tokens.data_ptr()
    del one
    taken = [torch.full((P * n, H), 7.0, device=me.device) for _ in range(3)]
    if address in [x.data_ptr() for x in taken]:
        yield "memory of copies in flight was given away"
    for x in taken:
        yield from differs("a new owner's memory", x, torch.full_like(x, 7.0))
    yield from check_gather(me, memory, "after copies were left behind", 2, n)
    for _ in range(2):
        try:
            stopped_gather(me.tokens(3, n), order_of(n), memory)
        except Stop:
            pass
        yield from check_gather(me, memory, "after none was published", 4, n)
    yield from check_replay(me, captured(me, memory, n), 5)


class SlowMemory(PeerMemory):
    """The current stream is held up after pull."""

    def pull(self, copies: Any) -> Any:
        arrivals = super().pull(copies)
        torch.cuda._sleep(LATE)
        return arrivals


def streams(me: Rank) -> Iterator[str]:
    """Calls on two streams that wait for nothing of each other, then a graph after both."""
    memory, n = me.memory(SlowMemory), 4000
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    inputs = [me.tokens(turn, n) for turn in (1, 2)]
    graph_of_two = captured(me, memory, n)
    torch.cuda.synchronize()
    results = []
    for x, stream in zip(inputs, (one, two), strict=True):
        with torch.cuda.stream(stream):
            results.append(gather(me, memory, x))
    one.wait_stream(two)
    with torch.cuda.stream(one):
        found = list(check_replay(me, graph_of_two, 3))  # synchronizes
    yield from found
    for turn, result in enumerate(results, start=1):
        yield from differs(f"stream {turn}", result, expected(me, turn, n))


def remade(me: Rank) -> Iterator[str]:
    """A group is destroyed and made anew under its name: its memory goes, the new one's works."""
    with mock.patch.object(transport, "_all_reach_all", lambda *_: True):
        for turn in range(3):
            both = transport.memories_of(me.group, me.device)
            if both is None:
                yield "no memories"
                return
            n = 50_000 if turn == 0 else 64
            yield from check_gather(me, both.hidden, f"group {turn}", turn, n)
            held = transport.held_bytes()
            del both
            if not 0 < held < (64 << 20) or (turn and held > (8 << 20)):
                yield f"{held} bytes held with group {turn}"
            dist.barrier(me.group)
            dist.destroy_process_group()
            if transport.held_bytes():
                yield f"{transport.held_bytes()} bytes held for a group that is no more"
            join(me.rank, f"{os.environ['ONE_DEVICE_STORE']}-{turn}")
            assert dist.group.WORLD is not None
            me = Rank(dist.group.WORLD, me.device, me.limit_s)


def hang(me: Rank) -> Iterator[str]:
    """Rank 1 does not publish: rank 0 ends by itself, and says whom it waited for."""
    memory = me.memory()
    yield from check_gather(me, memory, "before", 0, 64)
    if me.rank == 1:
        time.sleep(3 * SHORT_S)
        os._exit(0)
    gather(me, memory, me.tokens(1, 64))
    torch.cuda.synchronize()
    yield "waited, and went on"


def hang_in_replay(me: Rank) -> Iterator[str]:
    """The same in a graph's replay, which no host code knows of."""
    memory = me.memory()
    one = captured(me, memory, 64)
    yield from check_replay(me, one, 1)
    if me.rank == 1:
        time.sleep(3 * SHORT_S)
        os._exit(0)
    one[0].replay()
    torch.cuda.synchronize()
    yield "waited, and went on"


def alone(me: Rank) -> Iterator[str]:
    """Rank 1 alone raises before it publishes, and goes on to another call: no data are mixed."""
    memory = me.memory()
    yield from check_gather(me, memory, "before", 0, 64)
    if me.rank == 1:
        try:
            stopped_gather(me.tokens(1, 64), order_of(64), memory)
        except Stop:
            pass
        try:
            gather(me, memory, me.tokens(2, 64))
        except RuntimeError as error:
            print(f"raised as planned: {error}")
            if "ranks [0]" not in str(error):
                yield f"rank 0 is not named: {error}"
            sys.stdout.flush()
            os._exit(0)
        yield "went on alone"
    gather(me, memory, me.tokens(1, 64))
    torch.cuda.synchronize()
    yield "took what was published for another call"


def whole(me: Rank) -> Iterator[str]:
    """linear_cross_entropy in several ways, loss and gradients against fp64."""
    from tests import parallel_checks

    ranks = parallel_checks.Ranks(me.group, me.device)
    with mock.patch.object(transport, "_all_reach_all", lambda *_: True):
        yield from parallel_checks.gradients_against_fp64(ranks)
        if not transport.held_bytes():
            yield "no memory was shared"


@dataclass(frozen=True)
class Case:
    run: Callable[[Rank], Iterator[str]]
    aborts: str = ""
    """What rank 0 says as it ends by SIGABRT, if it must."""


IN_VAIN = "s for ranks [1] to publish tokens; this process ends"
CASES = {
    "eager": Case(eager),
    "graph": Case(graph),
    "failed_capture": Case(failed_capture),
    "exception": Case(exception),
    "streams": Case(streams),
    "remade": Case(remade),
    "hang": Case(hang, IN_VAIN),
    "hang_in_replay": Case(hang_in_replay, IN_VAIN),
    "alone": Case(alone, IN_VAIN),
    "whole": Case(whole),
}
