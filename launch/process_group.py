"""The process group of a program: torchrun's ranks, or none for one process alone."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import torch_private
from flce_dist.launch.program import RunError
from flce_dist.launch.yaml_config import require

Result = TypeVar("Result")
Group = dist.ProcessGroup | None

OTHERS_S = 60.0
"""How long a rank that raised waits for the others, which may still compile their kernels."""


def device_type_of(asked: str) -> str:
    """Return "cuda" or "cpu", also for "auto"; raise ``ConfigError`` if the GPU is missing."""
    has_gpu = torch.cuda.is_available()
    require(asked != "cuda" or has_gpu, "device=cuda needs a GPU, found none")
    return ("cuda" if has_gpu else "cpu") if asked == "auto" else asked


def start(device_type: str) -> tuple[torch.device, Group]:
    """Join torchrun's ranks or an existing default group; alone, there is no group."""
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        # Long enough for a rank that compiles kernels, short enough for one that is gone.
        timeout = timedelta(minutes=5)
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timeout)
    return device, dist.group.WORLD if dist.is_initialized() else None


def rank_and_size(group: Group) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def own_tokens(T: int, group: Group) -> slice:
    """Return which of T tokens are this rank's under sequence parallelism."""
    rank, P = rank_and_size(group)
    return slice(rank * T // P, (rank + 1) * T // P)


def gathered(x: Any, group: Group) -> list[Any]:
    """Return the object ``x`` of each rank, by rank; collective."""
    found = [x]
    if group is not None:
        found *= group.size()
        dist.all_gather_object(found, x, group=group)
    return found


def reduced(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce ``x`` over ranks in place and return it; collective."""
    if group is not None:
        dist.all_reduce(x, op, group=group)
    return x


def together(work: Callable[[], Result]) -> list[Result]:
    """Do ``work`` on every rank and return all results by rank; collective over all ranks.

    Raises, on every rank, the ``RunError`` of the first rank whose work raised one.
    """
    result, failure = None, None
    try:
        result = work()
    except RunError as error:
        failure = error
    outcomes = gathered((result, failure), dist.group.WORLD)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [result for result, _ in outcomes]


def on_rank_0(work: Callable[[], Result]) -> Result:
    """Do ``work`` on rank 0 alone; return its result, or raise its ``RunError``, on every rank.

    Only one rank reads the disk and decides, because other hosts may see changes later.
    """
    is_first = rank_and_size(dist.group.WORLD)[0] == 0
    return together(lambda: work() if is_first else None)[0]  # type: ignore[return-value]


def check_all_raised(what: str, failure: str, group: Group) -> None:
    """Raise a ``RunError`` if not all ranks raised here, too; those that did must call this.

    Collectives cannot tell: the next one would meet whatever another rank has left to issue.
    """
    if group is None:
        return
    store, ranks = torch_private.store_of(group), range(group.size())
    keys = [f"flce_dist/{what}/{rank}" for rank in ranks]
    store.set(keys[group.rank()], failure)
    try:
        store.wait(keys, timedelta(seconds=OTHERS_S))
    except RuntimeError as error:  # DistStoreError
        others = [rank for rank in ranks if not store.check([keys[rank]])]
        raise RunError(
            f"{what}: rank {group.rank()} raised {failure}; ranks {others} did not and are left in "
            "a collective, so nothing after this would count"
        ) from error
