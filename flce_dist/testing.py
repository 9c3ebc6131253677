"""For your own unit tests: simulated ranks on one machine, and a budget for numerical errors.

    import torch
    from flce_dist import linear_cross_entropy
    from flce_dist.testing import run_ranks

    def test_every_rank_returns_the_same_loss():
        hidden, weight = torch.randn(16, 32), torch.randn(100, 32)
        labels = torch.randint(100, (16,))

        def rank(tp_group):
            shard = weight.chunk(4)[tp_group.rank()]
            return linear_cross_entropy(hidden, shard, labels, tp_group=tp_group)

        losses = run_ranks(rank, 4)
        assert all(loss == losses[0] for loss in losses)

Two backends, for two purposes. "threads" runs any closure in milliseconds and names the rank whose
collective differs: for many small cases. "gloo" forks real processes with real collectives: for
truth, and for code with process-wide state (random generators, megatron-core). ``RankPool`` keeps
such processes for many calls.
"""

from collections.abc import Callable
from typing import Literal, TypeVar

import torch.distributed as dist

from flce_dist.error_budget import ErrorBudget, assert_within_budget, error_budget, relative_rms
from flce_dist.forked_ranks import RankFailed, RankPool
from flce_dist.threaded_ranks import ThreadedGroup, run_threads

__all__ = [
    "ErrorBudget",
    "RankFailed",
    "RankPool",
    "ThreadedGroup",
    "assert_within_budget",
    "error_budget",
    "relative_rms",
    "run_ranks",
]

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
        fn: any callable, a closure too. Over "threads" ranks share its variables; over "gloo" each
            has a copy, and what it returns is pickled (tensors detached).
        world_size: number of ranks, 1 or more.
        backend: "threads" of this process, or "gloo" over forked processes.
        timeout_s: for the whole call.

    Raises:
        Exception: what a rank raised, as it was, with a ``RankFailed`` naming the rank and holding
            its traceback as its cause. The other ranks are ended.
        RankFailed: a rank died (exit or signal), or raised what cannot be pickled.
        TimeoutError: naming the ranks that did not finish.
    """
    if backend not in ("threads", "gloo"):
        raise ValueError(f'backend must be "threads" or "gloo", got {backend!r}')
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if backend == "threads":
        return run_threads(fn, world_size, timeout_s)
    with RankPool(world_size, timeout_s=timeout_s) as pool:
        return pool.run_closure(fn)
