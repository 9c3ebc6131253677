"""What the ranks of a run do together: where one cannot go on, all stop with its error."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from flce_dist.launch.program import RunError

Result = TypeVar("Result")


def together(work: Callable[[], Result]) -> list[Result]:
    """Do ``work`` on every rank and return all results by rank; collective.

    Raises:
        RunError: on every rank, that of the first rank whose work raised one.
    """
    result, message = None, None
    try:
        result = work()
    except RunError as error:
        message = str(error)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, message))
    for _, failure in outcomes:
        if failure is not None:
            raise RunError(failure)
    return [result for result, _ in outcomes]


def on_rank_0(work: Callable[[], Result]) -> Result:
    """Do ``work`` on rank 0 alone; return its result, or raise its ``RunError``, on every rank.

    Only one rank reads the disk and decides, because other hosts may see changes later.
    """
    results: list[Any] = together(lambda: work() if dist.get_rank() == 0 else None)
    return results[0]


def say(message: str) -> None:
    """Print a line beside what the run prints; for one rank."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def said(what: str) -> Iterator[None]:
    """Let rank 0 print ``what`` before it starts, and afterwards how long it took."""
    start = time.perf_counter()
    if dist.get_rank() == 0:
        say(f"{what} ...")
    yield
    if dist.get_rank() == 0:
        say(f"{what}: {time.perf_counter() - start:.1f} s")
