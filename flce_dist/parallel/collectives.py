"""Collectives of a tensor-parallel group; None is one process.  P ranks, T tokens, H hidden size.

All ranks must call the same functions in the same order with the same shapes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two, and warns at their old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(tp_group: dist.ProcessGroup | None) -> int:
    return 1 if tp_group is None else dist.get_world_size(tp_group)


def group_rank(tp_group: dist.ProcessGroup | None) -> int:
    return 0 if tp_group is None else dist.get_rank(tp_group)


def message_device(x: Tensor, tp_group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of messages from host to host: the CPU if the group has a backend for it,
    else that of x if x is on a GPU, else the current GPU.
    """
    if tp_group is None or "cpu:" in dist.get_backend_config(tp_group):
        return torch.device("cpu")
    if x.is_cuda:
        return x.device
    return torch.device("cuda", torch.cuda.current_device())


def all_reduce_sum(x: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Sum ``x`` over ranks in place; every rank gets the same bits.

    As a ring each rank sends ``2 (P - 1) / P`` times the bytes of x.
    """
    return _all_reduce(x, dist.ReduceOp.SUM, tp_group)


def begin_all_reduce_sum(x: Tensor, tp_group: dist.ProcessGroup | None) -> dist.Work | None:
    """Begin the same, and return what the current stream must wait for, if anything."""
    if tp_group is None or not x.numel():
        return None
    return dist.all_reduce(x, dist.ReduceOp.SUM, tp_group, async_op=True)


def all_reduce_max(x: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Take the maximum of ``x`` over ranks in place; as many bytes as a sum."""
    return _all_reduce(x, dist.ReduceOp.MAX, tp_group)


def _all_reduce(x: Tensor, op: Any, tp_group: dist.ProcessGroup | None) -> Tensor:
    if tp_group is not None and x.numel():
        dist.all_reduce(x, op, tp_group)
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
    """Gathers [T / P, H] of every rank into ``tokens`` [T, H]; this class of one process."""

    owns_tokens = False  # whether ``tokens`` is a buffer of its own, not the caller's tensor

    def __init__(self, tokens: Tensor):
        self.tokens = tokens

    def start(self, *, beside: bool = False) -> None:
        """Start to gather, if that has not begun.

        ``beside``: for later. Nothing of it delays the current stream; in return, copies within the
        GPU may begin only where its kernels leave room.
        """

    def wait(self) -> Tensor:
        """Make the current stream wait for all tokens, and return them."""
        return self.tokens


class CollectiveGather(TokenGather):
    """Gathers by an all-gather."""

    owns_tokens = True

    def __init__(self, x: Tensor, group: dist.ProcessGroup):
        super().__init__(x.new_empty(group_size(group) * x.shape[0], *x.shape[1:]))
        self._x = x.contiguous()
        self._group = group
        self._work: dist.Work | None = None

    def start(self, *, beside: bool = False) -> None:
        if self._work is None and self._x.numel():
            self._work = all_gather(self.tokens, self._x, group=self._group, async_op=True)

    def wait(self) -> Tensor:
        self.start()
        if self._work is not None:
            self._work.wait()
        return self.tokens


class TokenSum:
    """Sums [T, H], ``tokens`` being this rank's share, over ranks; this class over one process."""

    def __init__(self, tokens: Tensor):
        self.tokens = self._sum = tokens
        self._work: dist.Work | None = None

    def acquire(self) -> None:
        """Make the current stream wait until ``tokens`` may be written."""

    def start(self) -> None:
        """Start to sum the tokens, which this rank has written."""

    def wait(self) -> Tensor:
        """Make the current stream wait for the sum, and return it: [T, H], or [T / P, H]."""
        if self._work is not None:
            self._work.wait()
        return self._sum


class CollectiveSum(TokenSum):
    """Sums by an all-reduce, in place, in the dtype of ``tokens``; every rank gets all tokens."""

    def __init__(self, tokens: Tensor, group: dist.ProcessGroup):
        super().__init__(tokens)
        self._group = group

    def start(self) -> None:
        if self.tokens.numel():
            self._work = dist.all_reduce(self.tokens, group=self._group, async_op=True)


class CollectiveScatter(TokenSum):
    """Sums by a reduce-scatter, in the dtype of ``tokens``; a rank gets its own [T / P, H]."""

    def __init__(self, tokens: Tensor, group: dist.ProcessGroup, out: Tensor | None = None):
        super().__init__(tokens)
        self._group = group
        if out is None:
            out = tokens.new_empty(tokens.shape[0] // group_size(group), *tokens.shape[1:])
        self._sum = out

    def start(self) -> None:
        if self.tokens.numel():
            self._work = reduce_scatter(self._sum, self.tokens, group=self._group, async_op=True)
