"""What travels between the ranks of a tensor-parallel group.  P ranks, T tokens, H hidden size.

``tp_group=None`` is one process: every function is then the identity and nothing is sent. All
ranks must call the same functions in the same order with the same shapes.
"""

from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor

from flce_dist.token_order import TokenOrder

# torch 2.13 renamed these two, and warns at their old names.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Pending(NamedTuple):
    """Collectives in flight; ``wait`` makes the current stream wait and returns their result."""

    result: Tensor
    works: tuple[dist.Work, ...] = ()

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.result


def group_of(name: str | None) -> dist.ProcessGroup | None:
    """Return the process group of this name, under which compiled code carries it."""
    if name is None:
        return None
    return dist.distributed_c10d._resolve_process_group(cast(Any, name))


def group_size(tp_group: dist.ProcessGroup | None) -> int:
    return 1 if tp_group is None else dist.get_world_size(tp_group)


def group_rank(tp_group: dist.ProcessGroup | None) -> int:
    return 0 if tp_group is None else dist.get_rank(tp_group)


def all_reduce_sum(x: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Sum ``x`` over ranks in place; every rank gets the same bits. 2 x bytes(x) on the wire."""
    return start_all_reduce(x, tp_group).wait()


def all_reduce_max(x: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Take the maximum of ``x`` over ranks in place. 2 x bytes(x) on the wire."""
    if tp_group is not None and x.numel():
        dist.all_reduce(x, dist.ReduceOp.MAX, group=tp_group)
    return x


def start_all_reduce(x: Tensor, tp_group: dist.ProcessGroup | None) -> Pending:
    """Begin to sum ``x`` over ranks in place."""
    if tp_group is None or not x.numel():
        return Pending(x)
    return Pending(x, (dist.all_reduce(x, group=tp_group, async_op=True),))


class TokenGather:
    """[T / P, H] of every rank on its way into ``tokens`` [T, H], piece by piece.

    Each rank receives (P - 1) / P of the result. The collectives of a group run one after the
    other, so a piece is started when its turn has come: what is started later waits for it.
    """

    def __init__(self, x: Tensor, order: TokenOrder, tp_group: dist.ProcessGroup | None):
        self._x, self._order, self._group = x, order, tp_group
        self._works: list[dist.Work | None] = []
        self.tokens = x
        self.owns_tokens = tp_group is not None  # else they are the caller's
        if tp_group is not None:
            self._x = x.contiguous()
            self.tokens = x.new_empty(group_size(tp_group) * x.shape[0], *x.shape[1:])

    def start(self, piece: int) -> None:
        """Begin with the next piece, if there is one and this is it."""
        if piece != len(self._works) or piece >= len(self._order.pieces):
            return
        start, end = self._order.pieces[piece]
        out = self.tokens[start:end]
        work = None
        if self._group is not None and out.numel():
            mine = self._x[self._order.local(piece)]
            work = all_gather(out, mine, group=self._group, async_op=True)
        self._works.append(work)

    def start_all(self) -> None:
        for piece in range(len(self._order.pieces)):
            self.start(piece)

    def wait(self, piece: int) -> None:
        """Make the current stream wait until this piece is there."""
        self.start(piece)
        work, self._works[piece] = self._works[piece], None
        if work is not None:
            work.wait()

    def wait_all(self) -> Tensor:
        for piece in range(len(self._order.pieces)):
            self.wait(piece)
        return self.tokens


def gather_tokens(x: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Gather [N / P, ...] of every rank into [N, ...], in rank order."""
    P = group_size(tp_group)
    return TokenGather(x, TokenOrder(P, ((0, P * x.shape[0]),)), tp_group).wait_all()


class TokenScatter:
    """[T, H] of every rank, summed over ranks; each is left its own [T / P, H].

    Each rank sends (P - 1) / P of ``tokens``. The sum is taken in its dtype.
    """

    def __init__(self, tokens: Tensor, order: TokenOrder, tp_group: dist.ProcessGroup):
        self.tokens, self._order, self._group = tokens, order, tp_group
        self._out = tokens.new_empty(tokens.shape[0] // order.P, *tokens.shape[1:])
        self._works: list[dist.Work] = []

    def start(self, first: int, last: int) -> None:
        """Begin with the pieces of tokens ``first <= t < last``, which are written."""
        for piece, (start, end) in self._order.between(first, last):
            mine = self.tokens[start:end]
            if mine.numel():
                out = self._out[self._order.local(piece)]
                work = reduce_scatter(out, mine, group=self._group, async_op=True)
                self._works.append(work)

    def wait(self) -> Tensor:
        return Pending(self._out, tuple(self._works)).wait()


class TokenSum:
    """[T, H] of every rank, summed over ranks in place and in its dtype."""

    def __init__(self, tokens: Tensor, tp_group: dist.ProcessGroup | None):
        self.tokens, self._group = tokens, tp_group
        self._works: list[dist.Work] = []

    def start(self, first: int, last: int) -> None:
        """Begin with tokens ``first <= t < last``, which are written."""
        self._works += start_all_reduce(self.tokens[first:last], self._group).works

    def wait(self) -> Tensor:
        return Pending(self.tokens, tuple(self._works)).wait()
