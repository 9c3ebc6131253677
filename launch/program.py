"""How a program of launch/ ends: one error is one message, whatever the number of ranks.

A ``RunError`` prints its message alone, in one line. Usually all ranks raise the same one, and
rank 0 prints it. Any other exception is a bug, or follows from the end of another rank: the rank
that failed first prints its traceback, the others one line each.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from flce_dist import torch_private

WAIT_S = 30.0
"""How long another rank than 0 waits to be ended before it prints a ``RunError`` of its own."""


class RunError(Exception):
    """An error that is explained by its message: what is wrong, where, and what to do."""


def run_program(main: Callable[[], int]) -> NoReturn:
    """Exit with what ``main`` returns; 2 after a ``RunError``, 1 after another exception."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        status = main()
        if dist.is_initialized():
            dist.destroy_process_group()
            _leave(status, at_once=True)
    except RunError as error:
        _wait_for_rank_0(rank)
        _report(f"error: {_line(error)}" if rank == 0 else f"error: rank {rank}: {_line(error)}")
        _leave(2)
    except SystemExit as error:
        if error.code == 2:  # a wrong command line, which rank 0 has explained
            _wait_for_rank_0(rank)
        raise
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except Exception as error:
        summary = f"rank {rank}: {type(error).__name__}: {_line(error)}"
        _report(summary, traceback.format_exc().rstrip() if _is_first_to_fail() else summary)
        _leave(1)
    sys.exit(status)


def _wait_for_rank_0(rank: int) -> None:
    """Give rank 0 the time to explain what every rank found; torchrun then ends this one.

    torchrun ends all ranks at the first exit. A rank that still runs after the wait is the only
    one with this error.
    """
    if rank != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(WAIT_S)


def _is_first_to_fail() -> bool:
    """Ask the store that the ranks met at; a rank that cannot ask counts as the first."""
    if not dist.is_initialized():
        return True
    try:
        return torch_private.default_store().add("flce_dist/failed", 1) == 1
    except Exception:
        return True


def _report(summary: str, message: str | None = None) -> None:
    """Print the message, and leave its summary where torchrun's own report looks for it."""
    print(message or summary, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"py_callstack": summary, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": summary, "extraInfo": extra}}))


def _line(error: Exception) -> str:
    return " ".join(str(error).split("\n"))


def _leave(status: int, *, at_once: bool = False) -> NoReturn:
    """End at once among ranks: tearing down a group whose members are gone can hang.

    Threads that a group leaves behind may also abort the interpreter while it shuts down.
    """
    if not at_once and not dist.is_initialized():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
