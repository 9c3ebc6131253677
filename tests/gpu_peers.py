"""Peer memory over the real CUDA driver on ONE GPU, which two processes share: one of them runs

    python -m tests.gpu_peers CASE RANK STORE

and test_peer_memory.py starts both. They meet over gloo by a file STORE, map each other's memory.
Streams wait for flags, graphs are captured and replayed as on two GPUs; only slower, since the GPU
runs one process at a time. Each case yields what is wrong on its rank, which is printed behind
"found: ".
"""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.parallel import transport
from flce_dist.parallel.peers.copies import PeerGather, PeerScatter
from flce_dist.parallel.peers.driver import PeerDriver, number_of_set_up
from flce_dist.parallel.peers.memory import PeerMemory

P = 2
H = 64
LIMIT_S = 60.0  # of waits, where nothing should hang
SHORT_S = 6.0  # where something does


@dataclass
class Rank:
    """One process of a case; ``group`` is the default group, over gloo."""

    rank: int
    limit_s: float
    device: torch.device
    group: Any = None

    def join(self, path: str) -> None:
        timeout = timedelta(seconds=LIMIT_S)
        store = dist.FileStore(path, P)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=P, timeout=timeout)
        self.group = dist.group.WORLD

    def memory(self) -> PeerMemory:
        driver = PeerDriver(self.group, self.device, str(number_of_set_up(self.group)))
        driver.limit_s = self.limit_s
        return PeerMemory(driver, "tokens")

    def tokens(self, turn: int, n: int) -> Tensor:
        return self.of(self.rank, turn, n)

    def of(self, rank: int, turn: int, n: int) -> Tensor:
        """What a rank sends in a turn, [n, H], no two numbers alike."""
        values = torch.arange(n * H, device=self.device, dtype=torch.float32).view(n, H)
        return values + (1000 * turn + rank) * 10_000


def expected(me: Rank, turn: int, n: int) -> Tensor:
    return torch.cat([me.of(rank, turn, n) for rank in range(P)])


def gather(memory: PeerMemory, x: Tensor) -> Tensor:
    return PeerGather(x, memory).wait()


def scatter(memory: PeerMemory, shares: Tensor) -> Tensor:
    total = PeerScatter((len(shares), H), torch.float32, memory)
    total.acquire()
    total.tokens.copy_(shares)
    total.start()
    return total.wait()


def expected_sum(me: Rank, turn: int, T: int) -> Tensor:
    total = torch.stack([me.of(rank, turn, T) for rank in range(P)]).sum(0)
    return total.tensor_split(P)[me.rank]


def differs(what: str, found: Tensor, right: Tensor) -> Iterator[str]:
    torch.cuda.synchronize()
    wrong = int((found != right).sum())
    if wrong:
        yield f"{what}: {wrong} of {right.numel()} numbers are wrong"


def check_gather(me: Rank, memory: PeerMemory, what: str, turn: int, n: int) -> Iterator[str]:
    yield from differs(what, gather(memory, me.tokens(turn, n)), expected(me, turn, n))


def delay(stream: int) -> None:
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        torch.cuda._sleep(200_000_000)  # cycles: 0.1 s


def captured(me: Rank, memory: PeerMemory, n: int) -> tuple[Any, list[Tensor], list[Tensor]]:
    """A graph of a gather and a sum: ``(graph, inputs, results)``."""
    inputs = [me.tokens(0, n).clone(), me.tokens(0, P * n).clone()]

    def step() -> list[Tensor]:
        return [gather(memory, inputs[0]), scatter(memory, inputs[1])]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step()
    return graph, inputs, results


def check_replay(
    me: Rank, capture: tuple[Any, list[Tensor], list[Tensor]], turn: int
) -> Iterator[str]:
    """Replay what ``captured`` returned, on this turn's numbers."""
    graph, (x, own), results = capture
    x.copy_(me.tokens(turn, len(x)))
    own.copy_(me.tokens(turn, len(own)))
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


def stopped_gather(x: Tensor, memory: PeerMemory) -> None:
    """Raise after the memory was acquired and before anything is published."""
    with mock.patch.object(memory, "pull", side_effect=Stop):
        PeerGather(x, memory).wait()


def failed_capture(me: Rank) -> Iterator[str]:
    """A capture fails between acquire and publish; the eager call after it waits for its peer."""
    memory = me.memory()
    n = 4000
    yield from check_gather(me, memory, "before", 0, n)
    dist.barrier(me.group)
    if me.rank == 1:
        delay(memory._stream)  # copies late what rank 0 published
    slow = gather(memory, me.tokens(1, n))
    if me.rank == 0:
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                stopped_gather(me.tokens(2, n), memory)
        except Exception as error:
            print(f"the capture failed as planned: {type(error).__name__}: {error}")
        else:
            yield "the capture did not fail"
    after = gather(memory, me.tokens(3, n))
    yield from differs("in flight during the capture", slow, expected(me, 1, n))
    yield from differs("after the capture", after, expected(me, 3, n))
    yield from check_replay(me, captured(me, memory, n), 4)


def exception(me: Rank) -> Iterator[str]:
    """All ranks raise with copies in flight, or before they publish: nothing is harmed."""
    memory = me.memory()
    n = 4000
    yield from check_gather(me, memory, "before", 0, n)
    delay(memory._stream)
    one = PeerGather(me.tokens(1, n), memory)
    one.start()
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
            stopped_gather(me.tokens(3, n), memory)
        except Stop:
            pass
        yield from check_gather(me, memory, "after none was published", 4, n)
    yield from check_replay(me, captured(me, memory, n), 5)


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
            held = transport.shared_bytes()
            del both
            if not 0 < held < (64 << 20) or (turn and held > (8 << 20)):
                yield f"{held} bytes held with group {turn}"
            dist.barrier(me.group)
            dist.destroy_process_group()
            if transport.shared_bytes():
                yield f"{transport.shared_bytes()} bytes held for a group that is no more"
            me.join(f"{sys.argv[3]}-{turn}")


def hang_in_replay(me: Rank) -> Iterator[str]:
    """Rank 1 does not replay a graph, of which no host code knows: rank 0 ends by itself."""
    memory = me.memory()
    one = captured(me, memory, 64)
    yield from check_replay(me, one, 1)
    if me.rank == 1:
        time.sleep(3 * SHORT_S)
        os._exit(0)
    one[0].replay()
    torch.cuda.synchronize()
    yield "waited, and went on"


def whole(me: Rank) -> Iterator[str]:
    """linear_cross_entropy in several ways, loss and gradients against fp64."""
    from tests import parallel_checks

    ranks = parallel_checks.Ranks(me.group, me.device)
    with mock.patch.object(transport, "_all_reach_all", lambda *_: True):
        yield from parallel_checks.gradients_against_fp64(ranks)
        if not transport.shared_bytes():
            yield "no memory was shared"


_cases = graph, failed_capture, exception, remade, hang_in_replay, whole
CASES = {case.__name__: case for case in _cases}
ABORTS = ("hang_in_replay",)  # rank 0 ends by SIGABRT, and says
IN_VAIN = "s for other ranks to publish tokens; this process ends"


def main(name: str, rank: str, store: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    me = Rank(int(rank), SHORT_S if name in ABORTS else LIMIT_S, device)
    me.join(store)
    found = []
    try:
        found += list(CASES[name](me))
        torch.cuda.synchronize()
    except BaseException:
        found.append(traceback.format_exc().rstrip())
    for line in found:
        print("found: " + line, flush=True)
    if not found:
        dist.barrier()
    sys.stdout.flush()
    os._exit(bool(found))  # whatever the GPU still waits for


if __name__ == "__main__":
    main(*sys.argv[1:])
