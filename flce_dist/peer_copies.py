"""Tokens between GPUs of one host, by copies from each other's memory: see ``peer_memory.py``.

P ranks, T tokens, H hidden size. Both do what their namesakes in ``collectives.py`` do, without
multiprocessors: gathers and sums are in flight while kernels fill the GPU.
"""

from collections.abc import Callable

from torch import Tensor

from flce_dist.collectives import TokenGather, TokenSum
from flce_dist.peer_memory import Arrival, Copy, PeerMemory
from flce_dist.token_order import TokenOrder


class PeerGather(TokenGather):
    """Pulls each rank's [T / P, H] out of its memory. All pieces start at once."""

    owns_tokens = True

    def __init__(self, x: Tensor, order: TokenOrder, memory: PeerMemory):
        super().__init__(x.new_empty(memory.P * x.shape[0], *x.shape[1:]), order)
        self._x, self._memory = x, memory
        self._arrivals: list[Arrival] | None = None

    def start(self, piece: int) -> None:
        if self._arrivals is not None:
            return
        x, memory = self._x, self._memory
        memory.reserve(x.nbytes)
        memory.acquire()
        memory.own(x.shape, x.dtype).copy_(x)
        pieces = range(len(self._order.pieces))
        self._arrivals = memory.pull([self._copy(piece) for piece in pieces])
        # Within a GPU a copy takes multiprocessors: here, ahead of what will fill them.
        for piece in pieces:
            self.tokens[self._order.part(piece, memory.rank)].copy_(x[self._order.local(piece)])

    def wait(self, piece: int) -> None:
        self.start(piece)
        assert self._arrivals is not None
        self._arrivals[piece].wait()

    def _copy(self, piece: int) -> Copy:
        def of(peer: int) -> tuple[Tensor, Tensor]:
            theirs = self._memory.of(peer, self._x.shape, self._x.dtype)
            return self.tokens[self._order.part(piece, peer)], theirs[self._order.local(piece)]

        return of


class PeerScatter(TokenSum):
    """Pulls every rank's share of this rank's tokens, and adds them up in fp32.

    ``tokens`` is this rank's memory itself (``share``), which waits for peers before it is written.
    """

    def __init__(
        self,
        tokens: Tensor,
        order: TokenOrder,
        memory: PeerMemory,
        sum_shares: Callable[..., None],
    ):
        super().__init__(tokens)
        self._order, self._memory, self._sum_shares = order, memory, sum_shares
        self._pulled: list[tuple[int, Tensor, Arrival]] = []  # piece, [P - 1, N, H]

    def acquire(self) -> None:
        self._memory.acquire()

    def start(self, first: int, last: int) -> None:
        tokens, memory = self.tokens, self._memory
        pieces = [piece for piece, _ in self._order.between(first, last)]
        shares = [tokens[self._order.part(piece, memory.rank)] for piece in pieces]
        others = [mine.new_empty(memory.P - 1, *mine.shape) for mine in shares]
        copies = [self._copy(*one) for one in zip(pieces, others, strict=True)]
        arrivals = memory.pull(copies)
        self._pulled += zip(pieces, others, arrivals, strict=True)

    def wait(self) -> Tensor:
        tokens, memory = self.tokens, self._memory
        out = tokens.new_empty(tokens.shape[0] // memory.P, *tokens.shape[1:])
        for piece, others, arrival in self._pulled:
            arrival.wait()
            mine = tokens[self._order.part(piece, memory.rank)]
            self._sum_shares(mine, others, memory.rank, out=out[self._order.local(piece)])
        memory.end_read()
        self._pulled.clear()
        return out

    def _copy(self, piece: int, others: Tensor) -> Copy:
        tokens, memory = self.tokens, self._memory

        def of(peer: int) -> tuple[Tensor, Tensor]:
            theirs = memory.of(peer, tokens.shape, tokens.dtype)
            slot = peer - (peer > memory.rank)
            return others[slot], theirs[self._order.part(piece, memory.rank)]

        return of
