"""The process group of a program: torchrun's ranks, or none for one process alone."""

import itertools
import logging
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.launch.program import RunError, launcher_number
from flce_dist.launch.yaml_config import require
from flce_dist.torch_private.groups import store_of

Result = TypeVar("Result")
Group = dist.ProcessGroup | None

TIMEOUT = timedelta(minutes=5)
"""Of collectives: enough for a rank that compiles kernels, not much for one that is gone."""

OTHERS_S = 60.0
"""How long a rank that raised waits for the others, which may still compile their kernels."""

_exchanges = itertools.count()


def device_type_of(asked: str) -> str:
    """Return "cuda" or "cpu", also for "auto".

    Raises ``ConfigError`` on every rank of a host that has too few GPUs for them.
    """
    has_gpu = torch.cuda.is_available()
    require(asked != "cuda" or has_gpu, "device=cuda needs a GPU, found none")
    kind = ("cuda" if has_gpu else "cpu") if asked == "auto" else asked
    if kind == "cuda":
        ranks = launcher_number("LOCAL_WORLD_SIZE", alone=1)
        gpus = torch.cuda.device_count()
        needs = f"device={asked} needs a GPU for each of the {ranks} ranks here, found {gpus}"
        require(ranks <= gpus, f"{needs}; start fewer, or give --device cpu")
    return kind


def start(device_type: str) -> tuple[torch.device, Group]:
    """Join torchrun's ranks or an existing default group; alone, there is no group."""
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", launcher_number("LOCAL_RANK", alone=0))
        torch.cuda.set_device(device)
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=TIMEOUT)
    return device, dist.group.WORLD if dist.is_initialized() else None


def quiet_megatron() -> None:
    """Show none of megatron-core's warnings from here on.

    It warns of each optional package that is not there, names what it will deprecate, and calls
    collectives by names that newer PyTorch deprecates.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")


def rank_and_size(group: Group) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def own_tokens(T: int, group: Group) -> slice:
    """Return which of T tokens are this rank's under sequence parallelism."""
    rank, P = rank_and_size(group)
    return slice(rank * T // P, (rank + 1) * T // P)


def gathered(x: Any, group: Group) -> list[Any]:
    """Return the object ``x`` of each rank, by rank; collective."""
    of_ranks = [x]
    if group is not None:
        of_ranks *= group.size()
        dist.all_gather_object(of_ranks, x, group=group)
    return of_ranks


def failures(own: str | None, group: Group) -> list[str | None]:
    """Return how each rank failed in what all have just done, None for success; collective.

    By the store, since a rank that raised may have left others in a collective, which any other
    would then meet. A rank that raised ends with a ``RunError`` if the others do not come.
    """
    if group is None:
        return [own]
    store = store_of(group)
    rank = group.rank()
    exchange = next(_exchanges)
    keys = [f"flce_dist/launch/{exchange}/{peer}" for peer in range(group.size())]
    store.set(keys[rank], own or "")
    try:
        store.wait(keys, timedelta(seconds=OTHERS_S) if own else TIMEOUT)
    except RuntimeError as error:  # DistStoreError
        if own is None:
            raise
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        raise RunError(f"rank {rank}: {own}; ranks {missing} are left in a collective") from error
    return [store.get(key).decode() or None for key in keys]


def reduced(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce ``x`` over ranks in place and return it; collective."""
    if group is not None:
        dist.all_reduce(x, op, group=group)
    return x


def together(work: Callable[[], Result]) -> list[Result]:
    """Do ``work`` on every rank and return all results by rank; collective over all ranks.

    Raises, on every rank, the ``RunError`` of the first rank whose work raised one.
    """
    result = None
    failure = None
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
