"""Tokens between GPUs of one host, by copies from each other's memory: see ``peer_memory.py``.

P ranks, T tokens, H hidden size. Both do what their namesakes in ``collectives.py`` do, without
multiprocessors: gathers and sums are in flight while kernels fill the GPU.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.parallel.collectives import TokenGather, TokenSum, Write
from flce_dist.parallel.peer_memory import Arrival, Copy, PeerMemory
from flce_dist.parallel.token_order import TokenOrder

_FIRST_BLOCK = 15  # of tokens, this part: with the blocks twice as long after it, four in all


class PeerGather(TokenGather):
    """Pulls each rank's [T / P, H] out of its memory. All pieces start at once."""

    owns_tokens = True

    def __init__(
        self, x: Tensor, order: TokenOrder, memory: PeerMemory, write: Write | None = None
    ):
        memory.open(x.nbytes)  # first of all: what raises later is noticed
        super().__init__(x.new_empty(memory.P * x.shape[0], *x.shape[1:]), order)
        self._x, self._memory, self._write = x, memory, write
        self._arrivals: list[Arrival] | None = None
        self._is_open = True

    def start(self, piece: int) -> None:
        if self._arrivals is not None:
            return
        x, memory = self._x, self._memory
        memory.acquire()
        own = memory.own(x.shape, x.dtype)
        if self._write is None:
            own.copy_(x)
        else:
            self._write(own)
        pieces = range(len(self._order.pieces))
        self._arrivals = memory.pull([self._copy(piece) for piece in pieces])
        # Within a GPU a copy takes multiprocessors: here, ahead of what will fill them.
        for piece in pieces:
            self.tokens[self._order.part(piece, memory.rank)].copy_(own[self._order.local(piece)])

    def wait(self, piece: int) -> None:
        self.start(piece)
        assert self._arrivals is not None
        self._arrivals[piece].wait()
        if self._is_open and piece == len(self._arrivals) - 1:
            self._memory.close()
            self._is_open = False

    def _copy(self, piece: int) -> Copy:
        def of(peer: int) -> tuple[Tensor, Tensor]:
            theirs = self._memory.of(peer, self._x.shape, self._x.dtype)
            return self.tokens[self._order.part(piece, peer)], theirs[self._order.local(piece)]

        return of


class _Pulled(NamedTuple):
    """Shares of this rank's N tokens of a piece."""

    piece: int
    others: Tensor  # [P - 1, N, H], of the peers
    scale: Tensor | None  # [N], of the sum
    arrival: Arrival


class PeerScatter(TokenSum):
    """Pulls every rank's share of this rank's tokens, and adds them up in fp32.

    ``tokens`` is this rank's memory itself. If it ``accumulates``, all of them at once and in 2
    bytes an element, the fp32 accumulator lies there, too, a little behind: it turns into
    ``tokens`` in ascending blocks, each as long as what was turned before leaves room for. Behind
    ``tokens`` there is then room for what the peers have.
    """

    scales = True

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        order: TokenOrder,
        memory: PeerMemory,
        sum_shares: Callable[..., None],
        *,
        accumulates: bool,
    ):
        T, H = shape
        nbytes = T * H * dtype.itemsize
        self._order, self._memory, self._sum_shares = order, memory, sum_shares
        self._pulled: list[_Pulled] = []
        self._lead = -(-T // _FIRST_BLOCK) if accumulates and dtype.itemsize == 2 else 0  # tokens
        self._acc_start = _aligned(self._lead * H * dtype.itemsize)
        self._others_start = _aligned(nbytes)
        memory.open(self._acc_start + T * H * 4 if self._lead else nbytes)
        super().__init__(memory.own(shape, dtype))

    def accumulator(self, tokens: int, dtype: torch.dtype) -> Tensor:
        if not self._lead:
            return super().accumulator(tokens, dtype)
        return self._memory.own(self.tokens.shape, dtype, self._acc_start)

    def blocks(self, tokens: int) -> list[slice]:
        if not self._lead:
            return super().blocks(tokens)
        bounds = [0]
        while bounds[-1] < tokens:
            bounds.append(min(tokens, self._lead + 2 * bounds[-1]))
        return [slice(*block) for block in itertools.pairwise(bounds)]

    def acquire(self) -> None:
        self._memory.acquire()

    def start(self, first: int, last: int, scale: Tensor | None = None) -> None:
        memory = self._memory
        pieces = [piece for piece, _ in self._order.between(first, last)]
        others = [self._room(piece) for piece in pieces]
        copies = [self._copy(*one) for one in zip(pieces, others, strict=True)]
        arrivals = memory.pull(copies)
        for piece, theirs, arrival in zip(pieces, others, arrivals, strict=True):
            mine = self._order.part(piece, memory.rank)
            here = None if scale is None else scale[mine.start - first : mine.stop - first]
            self._pulled.append(_Pulled(piece, theirs, here, arrival))

    def wait(self) -> Tensor:
        tokens, rank = self.tokens, self._memory.rank
        out = tokens.new_empty(tokens.shape[0] // self._memory.P, *tokens.shape[1:])
        for piece, others, scale, arrival in self._pulled:
            arrival.wait()
            mine, here = tokens[self._order.part(piece, rank)], out[self._order.local(piece)]
            self._sum_shares(mine, others, rank, scale, out=here)
        self._memory.close()
        self._pulled.clear()
        return out

    def _room(self, piece: int) -> Tensor:
        """Memory for the peers' shares of a piece, [P - 1, N, H]."""
        tokens, local = self.tokens, self._order.local(piece)
        peers, H = self._memory.P - 1, tokens.shape[1]
        shape = (peers, local.stop - local.start, H)
        if not self._lead:
            return tokens.new_empty(shape)
        start = self._others_start + peers * local.start * H * tokens.itemsize
        return self._memory.own(shape, tokens.dtype, start)

    def _copy(self, piece: int, others: Tensor) -> Copy:
        tokens, memory = self.tokens, self._memory

        def of(peer: int) -> tuple[Tensor, Tensor]:
            theirs = memory.of(peer, tokens.shape, tokens.dtype)
            slot = peer - (peer > memory.rank)
            return others[slot], theirs[self._order.part(piece, memory.rank)]

        return of


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 512) * 512
