"""Gather and sum of tokens by copies between GPUs of one host.  P ranks, H hidden size."""

from functools import partial

import torch
from torch import Tensor

from flce_dist.parallel.collectives import TokenGather, TokenSum
from flce_dist.parallel.peer_memory import Arrival, PeerMemory
from flce_dist.parallel.token_order import TokenOrder


class PeerGather(TokenGather):
    """Gathers [T / P, H] of every rank by copies. All chunks start at once."""

    owns_tokens = True

    def __init__(self, x: Tensor, order: TokenOrder, memory: PeerMemory):
        memory.open(x.nbytes)  # first: the next use then recovers from whatever raises below
        super().__init__(x.new_empty(memory.P * x.shape[0], *x.shape[1:]), order)
        self._x, self._memory = x.contiguous(), memory
        self._arrivals: list[Arrival] | None = None
        self._is_open = True

    def start(self, chunk: int) -> None:
        if self._arrivals is not None:
            return
        memory = self._memory
        memory.acquire()
        own, rows = memory.of(memory.rank, self._x.shape, self._x.dtype), slice(0, len(self._x))
        memory.copy(own, rows, self._x, rows)
        copies = [partial(self._copy, chunk) for chunk in range(len(self._order.chunks))]
        self._arrivals = memory.pull(copies)
        # Copies within one GPU are kernels: issue them now, ahead of kernels that fill the GPU.
        for copy in copies:
            memory.copy(*copy(memory.rank))

    def _await(self, chunk: int) -> None:
        assert self._arrivals is not None
        self._arrivals[chunk].wait()
        if self._is_open and chunk == len(self._arrivals) - 1:
            self._memory.close()
            self._is_open = False

    def _copy(self, chunk: int, rank: int) -> tuple[Tensor, slice, Tensor, slice]:
        of, theirs = self._order.local(chunk), self._memory.of(rank, self._x.shape, self._x.dtype)
        return self.tokens, self._order.part(chunk, rank), theirs, of


class PeerScatter(TokenSum):
    """Sums [T, H] over ranks: copies all ranks' shares of this rank's tokens, adds them in fp32."""

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, order: TokenOrder, memory: PeerMemory
    ):
        T, H = shape
        memory.open(T * H * dtype.itemsize)
        super().__init__(memory.of(memory.rank, shape, dtype))
        self._order, self._memory = order, memory
        self._copied: list[tuple[int, Tensor, Arrival]] = []
        """Number of a chunk, shares of all ranks in this rank's N tokens [P, N, H], arrival."""

    def acquire(self) -> None:
        self._memory.acquire()

    def start(self, chunk: int) -> None:
        mine = self.tokens[self._order.part(chunk, self._memory.rank)]
        shares = mine.new_empty(self._memory.P, *mine.shape)
        (arrival,) = self._memory.pull([partial(self._copy, chunk, shares)])
        self._copied.append((chunk, shares, arrival))

    def wait(self) -> Tensor:
        tokens = self.tokens
        out = tokens.new_empty(tokens.shape[0] // self._memory.P, *tokens.shape[1:])
        for chunk, shares, arrival in self._copied:
            self._memory.copy(*self._copy(chunk, shares, self._memory.rank))
            arrival.wait()
            # Adds in fp32 and rounds once, also for 16-bit shares.
            torch.sum(shares, 0, out=out[self._order.local(chunk)])
        self._memory.close()
        self._copied.clear()
        return out

    def _copy(self, chunk: int, shares: Tensor, rank: int) -> tuple[Tensor, slice, Tensor, slice]:
        of = self._order.part(chunk, self._memory.rank)
        theirs = self._memory.of(rank, self.tokens.shape, self.tokens.dtype)
        return shares[rank], slice(0, shares.shape[1]), theirs, of
