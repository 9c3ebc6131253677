"""Collectives of a tensor-parallel group; None is one process.  P ranks, T tokens, H hidden size.

All ranks must call the same functions in the same order with the same shapes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.parallel.token_order import TokenOrder
from flce_dist.replay import issued

# torch 2.13 renamed these two, and warns at their old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(tp_group: dist.ProcessGroup | None) -> int:
    return 1 if tp_group is None else dist.get_world_size(tp_group)


def group_rank(tp_group: dist.ProcessGroup | None) -> int:
    return 0 if tp_group is None else dist.get_rank(tp_group)


def message_device(x: Tensor, tp_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of messages between hosts: the CPU if it can, else x's or the current."""
    if tp_group is None or "cpu:" in dist.get_backend_config(tp_group):
        return torch.device("cpu")
    if x.is_cuda:
        return x.device
    return torch.device("cuda", torch.cuda.current_device())


def all_reduce_sum(x: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Sum ``x`` over ranks in place; every rank gets the same bits. 2 x bytes(x) on the wire."""
    return _all_reduce(x, dist.ReduceOp.SUM, tp_group)


def all_reduce_max(x: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Take the maximum of ``x`` over ranks in place. 2 x bytes(x) on the wire."""
    return _all_reduce(x, dist.ReduceOp.MAX, tp_group)


def _all_reduce(x: Tensor, op: Any, tp_group: dist.ProcessGroup | None) -> Tensor:
    if tp_group is not None and x.numel():
        issued(dist.all_reduce, x, op, tp_group)
    return x


def gather_tokens(x: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Gather [N / P, ...] of every rank into [N, ...], in rank order."""
    if tp_group is None:
        return x
    out = x.new_empty(group_size(tp_group) * x.shape[0], *x.shape[1:])
    if out.numel():
        all_gather(out, x.contiguous(), group=tp_group)
    return out


class TokenGather:
    """Gathers [T / P, H] of every rank into ``tokens`` [T, H] by chunks; here of one process."""

    owns_tokens = False

    def __init__(self, tokens: Tensor, order: TokenOrder):
        self.tokens, self._order = tokens, order
        self._arrived: set[int] = set()

    def start(self, chunk: int) -> None:
        """Start to gather this chunk if it is the next one."""

    def start_all(self) -> None:
        for chunk in range(len(self._order.chunks)):
            self.start(chunk)

    def wait(self, chunk: int) -> None:
        """Make the current stream wait until this chunk has arrived."""
        if chunk not in self._arrived:
            self._arrived.add(chunk)
            self.start(chunk)
            self._await(chunk)

    def wait_all(self) -> Tensor:
        for chunk in range(len(self._order.chunks)):
            self.wait(chunk)
        return self.tokens

    def _await(self, chunk: int) -> None:
        pass


class CollectiveGather(TokenGather):
    """Gathers by all-gathers; callers first issue the collectives that they need before a chunk."""

    owns_tokens = True

    def __init__(self, x: Tensor, order: TokenOrder, group: dist.ProcessGroup):
        super().__init__(x.new_empty(group_size(group) * x.shape[0], *x.shape[1:]), order)
        self._x, self._group = x.contiguous(), group
        self._works: list[dist.Work | None] = []

    def start(self, chunk: int) -> None:
        if chunk != len(self._works) or chunk >= len(self._order.chunks):
            return
        out, work = self.tokens[slice(*self._order.chunks[chunk])], None
        if out.numel():
            mine = self._x[self._order.local(chunk)]
            work = all_gather(out, mine, group=self._group, async_op=True)
        self._works.append(work)

    def _await(self, chunk: int) -> None:
        work, self._works[chunk] = self._works[chunk], None
        if work is not None:
            work.wait()


class TokenSum:
    """Sums [T, H], ``tokens`` being this rank's share, over ranks; this class over one process."""

    def __init__(self, tokens: Tensor):
        self.tokens = self._sum = tokens
        self._works: list[dist.Work] = []

    def acquire(self) -> None:
        """Make the current stream wait until ``tokens`` may be written."""

    def start(self, chunk: int) -> None:
        """Start to sum the tokens of a chunk, which this rank has written."""

    def wait(self) -> Tensor:
        """Make the current stream wait for the sum, and return it: [T, H], or this [T / P, H]."""
        for work in self._works:
            work.wait()
        return self._sum


class CollectiveSum(TokenSum):
    """Sums by all-reduces, in place and in the dtype of ``tokens``; every rank gets all tokens."""

    def __init__(self, tokens: Tensor, order: TokenOrder, group: dist.ProcessGroup):
        super().__init__(tokens)
        self._order, self._group = order, group

    def start(self, chunk: int) -> None:
        mine = self.tokens[slice(*self._order.chunks[chunk])]
        if mine.numel():
            self._works.append(dist.all_reduce(mine, group=self._group, async_op=True))


class CollectiveScatter(TokenSum):
    """Sums by reduce-scatters, in the dtype of ``tokens``; a rank gets its own [T / P, H]."""

    def __init__(self, tokens: Tensor, order: TokenOrder, group: dist.ProcessGroup):
        super().__init__(tokens)
        self._order, self._group = order, group
        self._sum = tokens.new_empty(tokens.shape[0] // order.P, *tokens.shape[1:])

    def start(self, chunk: int) -> None:
        mine = self.tokens[slice(*self._order.chunks[chunk])]
        if mine.numel():
            out = self._sum[self._order.local(chunk)]
            self._works.append(reduce_scatter(out, mine, group=self._group, async_op=True))
