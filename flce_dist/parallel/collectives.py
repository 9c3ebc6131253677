"""What travels between the ranks of a tensor-parallel group.  P ranks, T tokens, H hidden size.

``tp_group=None`` is one process: every function is then the identity and nothing is sent. All
ranks must call the same functions in the same order with the same shapes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.parallel.token_order import TokenOrder

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


def message_device(x: object, tp_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of messages between hosts: the CPU if the group sends from there.

    Else it is that of ``x`` or, if that is no tensor on a GPU, the current GPU.
    """
    if tp_group is None or "cpu:" in dist.get_backend_config(tp_group):
        return torch.device("cpu")
    if isinstance(x, Tensor) and x.is_cuda:
        return x.device
    return torch.device("cuda", torch.cuda.current_device())


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

    This one is of one process, whose tokens are all here: they are its caller's.
    """

    owns_tokens = False

    def __init__(self, x: Tensor, order: TokenOrder):
        self.tokens, self._order = x, order

    def start(self, piece: int) -> None:
        """Begin with the next piece, if there is one and this is it."""

    def wait(self, piece: int) -> None:
        """Make the current stream wait until this piece is there."""

    def start_all(self) -> None:
        for piece in range(len(self._order.pieces)):
            self.start(piece)

    def wait_all(self) -> Tensor:
        for piece in range(len(self._order.pieces)):
            self.wait(piece)
        return self.tokens


Write = Callable[[Tensor], None]
"""Writes into memory of a rank's own [T / P, H] what the others are to receive instead of it."""


class CollectiveGather(TokenGather):
    """By all-gathers. Each rank receives (P - 1) / P of ``tokens``.

    The collectives of a group run one after the other, so a piece is started when its turn has
    come: what is started later waits for it.
    """

    owns_tokens = True

    def __init__(
        self, x: Tensor, order: TokenOrder, tp_group: dist.ProcessGroup, write: Write | None = None
    ):
        super().__init__(x.new_empty(group_size(tp_group) * x.shape[0], *x.shape[1:]), order)
        self._group = tp_group
        if write is None:
            self._x = x.contiguous()
        else:
            self._x = x.new_empty(x.shape)
            write(self._x)
        self._works: list[dist.Work | None] = []

    def start(self, piece: int) -> None:
        if piece != len(self._works) or piece >= len(self._order.pieces):
            return
        start, end = self._order.pieces[piece]
        out = self.tokens[start:end]
        work = None
        if out.numel():
            mine = self._x[self._order.local(piece)]
            work = all_gather(out, mine, group=self._group, async_op=True)
        self._works.append(work)

    def wait(self, piece: int) -> None:
        self.start(piece)
        work, self._works[piece] = self._works[piece], None
        if work is not None:
            work.wait()


def gather_tokens(x: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Gather [N / P, ...] of every rank into [N, ...], in rank order."""
    if tp_group is None:
        return x
    P = group_size(tp_group)
    order = TokenOrder(P, ((0, P * x.shape[0]),))
    return CollectiveGather(x, order, tp_group).wait_all()


class TokenSum:
    """[T, H] of every rank, summed over ranks; ``tokens`` is what this rank adds.

    This one is of one process, which has the sum already.
    """

    scales = False
    """Whether the sum can be multiplied by a number for each token."""

    def __init__(self, tokens: Tensor):
        self.tokens = tokens

    def accumulator(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """Return memory in which to sum up a chunk of so many tokens, [N, H]."""
        return self.tokens.new_empty(tokens, self.tokens.shape[1], dtype=dtype)

    def blocks(self, tokens: int) -> list[slice]:
        """Return in which blocks a chunk's accumulator must be turned into ``tokens``, in order."""
        return [slice(0, tokens)]

    def acquire(self) -> None:
        """Make the current stream wait until ``tokens`` may be written."""

    def start(self, first: int, last: int, scale: Tensor | None = None) -> None:
        """Begin with tokens ``first <= t < last``, whole pieces, which are written.

        Their sum is multiplied by ``scale`` [last - first], None is 1.
        """
        assert scale is None

    def wait(self) -> Tensor:
        """Make the current stream wait for the sum of this rank's tokens, and return it."""
        return self.tokens


class CollectiveSum(TokenSum):
    """By all-reduces, in place and in the dtype of ``tokens``: every rank has all tokens' sums."""

    def __init__(self, tokens: Tensor, tp_group: dist.ProcessGroup):
        super().__init__(tokens)
        self._group = tp_group
        self._works: list[dist.Work] = []

    def start(self, first: int, last: int, scale: Tensor | None = None) -> None:
        assert scale is None
        self._works += start_all_reduce(self.tokens[first:last], self._group).works

    def wait(self) -> Tensor:
        return Pending(self.tokens, tuple(self._works)).wait()


class CollectiveScatter(TokenSum):
    """By reduce-scatters, in the dtype of ``tokens``: a rank is left its own [T / P, H].

    Each rank sends (P - 1) / P of ``tokens``.
    """

    def __init__(self, tokens: Tensor, order: TokenOrder, tp_group: dist.ProcessGroup):
        super().__init__(tokens)
        self._order, self._group = order, tp_group
        self._out = tokens.new_empty(tokens.shape[0] // order.P, *tokens.shape[1:])
        self._works: list[dist.Work] = []

    def start(self, first: int, last: int, scale: Tensor | None = None) -> None:
        assert scale is None
        for piece, (start, end) in self._order.between(first, last):
            mine = self.tokens[start:end]
            if mine.numel():
                out = self._out[self._order.local(piece)]
                work = reduce_scatter(out, mine, group=self._group, async_op=True)
                self._works.append(work)

    def wait(self) -> Tensor:
        return Pending(self._out, tuple(self._works)).wait()
