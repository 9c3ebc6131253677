"""One call on simulated ranks."""

from collections.abc import Callable
from typing import Literal, TypeVar

import torch.distributed as dist

from flce_dist.testing.forked_ranks import RankPool
from flce_dist.testing.threaded_ranks import run_threads

Result = TypeVar("Result")


def run_ranks(
    fn: Callable[[dist.ProcessGroup], Result],
    world_size: int,
    *,
    backend: Literal["threads", "gloo"] = "threads",
    timeout_s: float = 60.0,
) -> list[Result]:
    """Call ``fn(tp_group)`` on each of ``world_size`` simulated ranks; return results by rank.

    Each rank has a default process group of all ranks, which is also ``fn``'s argument:
    ``tp_group.rank()`` says who is calling, and ``torch.distributed.new_group`` makes subgroups.

    Args:
        fn: any callable, also a closure. Over "threads" ranks share its variables; over "gloo" each
            rank has a copy, and results are pickled, with tensors detached.
        world_size: number of ranks, 1 or more.
        backend: "threads" of this process, or "gloo" over forked processes.
        timeout_s: for the whole call.

    Raises:
        Exception: the exception that a rank raised. Its cause is a ``RankFailed`` with the rank's
            number and traceback. The other ranks are ended.
        RankFailed: a rank exited or was killed, or its exception cannot be pickled.
        TimeoutError: some ranks did not finish; the message names them.
    """
    if backend not in ("threads", "gloo"):
        raise ValueError(f'backend must be "threads" or "gloo", got {backend!r}')
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if backend == "threads":
        return run_threads(fn, world_size, timeout_s)
    with RankPool(world_size, timeout_s=timeout_s) as pool:
        return pool.run_closure(fn)
