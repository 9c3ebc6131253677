"""What travels between the ranks of a tensor-parallel group.  P ranks, T tokens, H hidden size.

``tp_group=None`` is one process: every function is then the identity and nothing is sent. All
ranks must call the same functions in the same order with the same shapes.
"""

from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two, and warns at their old names.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Pending(NamedTuple):
    """A collective in flight; ``wait`` makes the current stream wait and returns its result."""

    result: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
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
        return Pending(x, None)
    return Pending(x, dist.all_reduce(x, group=tp_group, async_op=True))


def start_gather_tokens(x: Tensor, tp_group: dist.ProcessGroup | None) -> Pending:
    """Begin to gather [T / P, H] of every rank into [T, H], in rank order.

    Each rank receives (P - 1) / P of the result.
    """
    if tp_group is None:
        return Pending(x, None)
    out = x.new_empty(group_size(tp_group) * x.shape[0], *x.shape[1:])
    if not out.numel():
        return Pending(out, None)
    return Pending(out, all_gather(out, x.contiguous(), group=tp_group, async_op=True))


def start_scatter_tokens(x: Tensor, tp_group: dist.ProcessGroup | None) -> Pending:
    """Begin to sum [T, H] over ranks and leave each its own [T / P, H].

    Each rank sends (P - 1) / P of ``x``. The sum is taken in x's dtype.
    """
    if tp_group is None:
        return Pending(x, None)
    out = x.new_empty(x.shape[0] // group_size(tp_group), *x.shape[1:])
    if not x.numel():
        return Pending(out, None)
    return Pending(out, reduce_scatter(out, x, group=tp_group, async_op=True))
