"""Gather and sum of tokens by copies between GPUs of one host.  P ranks, H hidden size."""

import torch
from torch import Tensor

from flce_dist.parallel.collectives import TokenGather, TokenSum
from flce_dist.parallel.peers.memory import Arrival, PeerMemory


class PeerGather(TokenGather):
    """Gathers [T / P, H] of every rank by copies."""

    owns_tokens = True

    def __init__(self, x: Tensor, memory: PeerMemory):
        memory.open(x.nbytes)  # first: the next use then recovers from whatever raises below
        super().__init__(x.new_empty(memory.P * x.shape[0], *x.shape[1:]))
        self._x = x.contiguous()
        self._memory = memory
        self._arrival: Arrival | None = None
        self._is_open = True

    def start(self, *, beside: bool = False) -> None:
        if self._arrival is not None:
            return
        memory = self._memory
        own = memory.of(memory.rank, self._x.shape, self._x.dtype)
        rows = slice(0, len(self._x))
        mine = (own, rows, self._x, rows)
        if beside:
            self._arrival = memory.pull_beside(mine, self._copy)
            return
        memory.acquire()
        memory.copy(*mine)
        self._arrival = memory.pull(self._copy)
        # A copy within one GPU is a kernel: issue it now, ahead of kernels that fill the GPU.
        memory.copy(*self._copy(memory.rank))

    def wait(self) -> Tensor:
        self.start()
        if self._is_open:
            assert self._arrival is not None
            self._arrival.wait()
            self._memory.close()
            self._is_open = False
        return self.tokens

    def _copy(self, rank: int) -> tuple[Tensor, slice, Tensor, slice]:
        theirs = self._memory.of(rank, self._x.shape, self._x.dtype)
        n = len(self._x)
        return self.tokens, slice(rank * n, (rank + 1) * n), theirs, slice(0, n)


class PeerScatter(TokenSum):
    """Sums [T, H] over ranks: copies all ranks' shares of this rank's tokens, adds them in fp32."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        memory: PeerMemory,
        out: Tensor | None = None,
    ):
        T, H = shape
        memory.open(T * H * dtype.itemsize)
        super().__init__(memory.of(memory.rank, shape, dtype))
        self._memory = memory
        self._out = out

    def acquire(self) -> None:
        self._memory.acquire()

    def start(self) -> None:
        T, H = self.tokens.shape
        self._shares = self.tokens.new_empty(self._memory.P, T // self._memory.P, H)  # of all ranks
        self._arrival = self._memory.pull(self._copy)

    def wait(self) -> Tensor:
        self._memory.copy(*self._copy(self._memory.rank))
        self._arrival.wait()
        # Adds in fp32 and rounds once, also for 16-bit shares.
        out = torch.sum(self._shares, 0, out=self._out)
        self._memory.close()
        del self._shares
        return out

    def _copy(self, rank: int) -> tuple[Tensor, slice, Tensor, slice]:
        theirs = self._memory.of(rank, self.tokens.shape, self.tokens.dtype)
        n = self._shares.shape[1]
        mine = self._memory.rank
        return self._shares[rank], slice(0, n), theirs, slice(mine * n, (mine + 1) * n)
