"""How a program of launch/ ends: one error is one message, whatever the number of ranks.

A ``RunError`` prints its message alone, in one line. Usually all ranks raise the same one, and
rank 0 prints it. Any other exception is a bug, or follows from the end of another rank: the rank
that failed first prints its traceback, the others one line each.

Programs import this module before all packages that an extra of pyproject.toml brings, so that one
that is not installed is such a message, too.
"""

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from flce_dist.torch_private.groups import default_store

WAIT_S = 30.0
"""How long another rank than 0 waits to be ended before it prints a ``RunError`` of its own."""

STDOUT = 1
HERE = "flce_dist.launch."
_SPEC = sys.modules["__main__"].__spec__
PROGRAM = _SPEC.name.removesuffix(".__main__") if _SPEC else ""
"""What stands after ``python -m``."""

MODULES = {
    "verify": {"rich", "tyro", "yaml"},
    "bench": {"matplotlib", "rich", "tyro", "yaml"},
    "train": {*"matplotlib megatron mistral_common rich tensorboard tqdm tyro yaml".split()},
}
"""What each extra of pyproject.toml brings."""
EXTRAS = {"verify": "verify", "finetune": "verify", "bench": "bench", "plot": "bench"}
"""The extra of a program, by the folder it is in; that of others is "train"."""


class RunError(Exception):
    """An error that is explained by its message: what is wrong, where, and what to do."""


def has_launcher() -> bool:
    """Whether torchrun, or what stands for it, has started this process as a rank."""
    return not {"RANK", "WORLD_SIZE"}.isdisjoint(os.environ)


def launcher_number(name: str, alone: int | None = None) -> int:
    """Return a number that torchrun sets for each rank; ``alone`` if there is no launcher.

    Raises ``RunError`` if it is no number, or is missing where others are set.
    """
    value = os.environ.get(name)
    if value is None and alone is not None and not has_launcher():
        return alone
    if value is None or not value.isdecimal():
        got = "nothing" if value is None else repr(value)
        raise RunError(
            f"the environment variable {name} must be a number, got {got}; torchrun sets RANK, "
            "WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, and without a launcher none may be set"
        )
    return int(value)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Exit with what ``main`` returns; 2 after a ``RunError``, 1 after another exception."""
    rank = 0
    try:
        rank = launcher_number("RANK", alone=0)
        status = _status(main)
        if dist.is_initialized():
            dist.destroy_process_group()
            _leave(status, at_once=True)
    except RunError as error:
        _wait_for_rank_0(rank)
        line = " ".join(str(error).split("\n"))
        _report(f"error: {line}" if rank == 0 else f"error: rank {rank}: {line}")
        _leave(2)
    except SystemExit as error:
        if error.code == 2:  # a wrong command line, which rank 0 has explained
            _wait_for_rank_0(rank)
        raise
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_unread(STDOUT):
            # As other programs in a shell's pipe end, such as before ``| head``.
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
            _leave(128 + signal.SIGPIPE)
        line = " ".join(str(error).split("\n"))
        summary = f"rank {rank}: {type(error).__name__}: {line}"
        _report(summary, traceback.format_exc().rstrip() if _is_first_to_fail() else summary)
        _leave(1)
    sys.exit(status)


def _status(main: Callable[[], int]) -> int:
    """Return what ``main`` does once all it printed is written."""
    try:
        status = main()
    except SystemExit:  # of --help
        sys.stdout.flush()
        raise
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(PROGRAM.removeprefix(HERE), "train")
        if error.name not in MODULES[extra]:
            raise
        needs = f"{PROGRAM} needs {error.name}: pip install 'flce_dist[{extra}]'"
        raise RunError(needs) from error
    sys.stdout.flush()
    return status


def _end_of_imports(kind: type, error: BaseException, trace: Any) -> None:
    """What a program raises before it comes to ``run_program`` ends it in the same way."""

    def raises() -> int:
        raise error

    run_program(raises)


if PROGRAM.startswith(HERE):
    sys.excepthook = _end_of_imports


def _is_unread(descriptor: int) -> bool:
    """Whether nobody is left to read what is written there."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _wait_for_rank_0(rank: int) -> None:
    """Give rank 0 the time to explain what every rank found, and torchrun the time to end all.

    A rank that still runs after the wait is the only one with this error.
    """
    if rank != 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(WAIT_S)


def _is_first_to_fail() -> bool:
    """Ask the store that the ranks met at; a rank that cannot ask counts as the first."""
    try:
        return default_store().add("flce_dist/failed", 1) == 1
    except Exception:
        return True


def _report(summary: str, message: str | None = None) -> None:
    """Print the message, and leave its summary where torchrun's own report looks for it."""
    print(message or summary, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"py_callstack": summary, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": summary, "extraInfo": extra}}))


def _leave(status: int, *, at_once: bool = False) -> NoReturn:
    """End at once among ranks: tearing down a group whose members are gone can hang.

    Threads that a group leaves behind may also abort the interpreter while it shuts down.
    """
    if not at_once and not dist.is_initialized():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
