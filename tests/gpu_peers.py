"""A rank of gpu_peers_cases.py, what it does with PeerMemory, and what must come of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.parallel.peer_copies import PeerGather, PeerScatter
from flce_dist.parallel.peer_driver import PeerDriver
from flce_dist.parallel.peer_memory import PeerMemory
from flce_dist.parallel.token_order import TokenOrder

P = 2
H = 64
LIMIT_S = 60.0  # of waits, where nothing should hang
SHORT_S = 6.0  # where something does
LATE = 200_000_000  # cycles: 0.1 s


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
        driver = PeerDriver(self.group, self.device)
        driver.limit_s = self.limit_s
        return PeerMemory(driver, "tokens")

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


def gather(memory: PeerMemory, x: Tensor) -> Tensor:
    return PeerGather(x, order_of(len(x)), memory).wait_all()


def scatter(memory: PeerMemory, shares: Tensor) -> Tensor:
    T = len(shares)
    total = PeerScatter((T, H), torch.float32, order_of(T // P), memory)
    total.acquire()
    total.tokens.copy_(shares)
    total.start(0, T)
    return total.wait()


def expected_sum(me: Rank, turn: int, T: int) -> Tensor:
    order, out = order_of(T // P), torch.empty(T // P, H, device=me.device)
    for piece in range(2):
        mine = order.part(piece, me.rank)
        out[order.local(piece)] = sum(me.of(rank, turn, T)[mine] for rank in range(P))
    return out


def differs(what: str, found: Tensor, right: Tensor) -> Iterator[str]:
    torch.cuda.synchronize()
    wrong = int((found != right).sum())
    if wrong:
        yield f"{what}: {wrong} of {right.numel()} numbers are wrong"


def check_gather(me: Rank, memory: PeerMemory, what: str, turn: int, n: int) -> Iterator[str]:
    yield from differs(what, gather(memory, me.tokens(turn, n)), expected(me, turn, n))


def delay(stream: Any) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE)


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


def check_replay(me: Rank, of: tuple[Any, list[Tensor], list[Tensor]], turn: int) -> Iterator[str]:
    graph, (x, own), results = of
    x.copy_(me.tokens(turn, len(x)))
    own.copy_(me.tokens(turn, len(own)))
    graph.replay()
    right = [expected(me, turn, len(x)), expected_sum(me, turn, len(own))]
    for name, found, wanted in zip(("gather", "sum"), results, right, strict=True):
        yield from differs(f"replay {turn}, {name}", found, wanted)
