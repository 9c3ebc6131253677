"""One run at a time writes into an output folder; ``run.lock`` there says which.

The lock is an flock, which the kernel gives back when its process ends, however it ends. The text
in the file is for others to read; a run removes it at its end, so text without an flock was left
by a run that was killed, or is that of a run on another machine whose locks are not seen here.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from flce_dist.launch.program import RunError
from flce_dist.launch.read import parse_json, read_bytes, regular
from flce_dist.launch.train.ranks import say
from flce_dist.launch.write import writing

LOCK = "run.lock"
_LOOKS = 50  # at a lock without text, for a second
_PAUSE_S = 0.02


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process, the one rank that writes most of it.

    Raises ``RunError`` if another run holds it, or one that was killed on another machine held it.
    """
    path = folder / LOCK
    owner = this_run()
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        # Unbuffered: closing a buffer that a full disk does not take would raise once more.
        file = open(path, "ab+", buffering=0, opener=regular)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            use = f"{folder} is in use by {_holder(path)}"
            raise RunError(f"{use}; wait for its end, or use another --out-dir") from None
        except OSError as error:
            must = "--out-dir must be on a file system that has flock"
            raise RunError(f"cannot lock {path}: {error.strerror}; {must}") from error
        if path.stat().st_size > 0:
            holder, before = _read(path)
            # If one of these is equal, the run that left the text is over: flock sees the runs of
            # this machine, and Slurm restarts a job only after all its processes have ended.
            same = ("host", "boot", "slurm_job")
            if not any(owner[key] and owner[key] == before.get(key) for key in same):
                raise RunError(
                    f"{folder} is held by {holder}, and {owner['host']} cannot see whether that "
                    f"still runs. If it does not, remove {path}"
                )
            say(f"{holder} ended without giving {folder} back; taking it over")
        with writing(path):
            file.truncate(0)
            file.write(f"{json.dumps(owner)}\n".encode())
        try:
            yield
        finally:
            file.truncate(0)
            fcntl.flock(file, fcntl.LOCK_UN)  # closing alone would leave it to forked children


def this_run() -> dict[str, Any]:
    """Return what tells this process from others; ``boot`` is one for all containers of a host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "boot": boot.read_text().strip() if boot.exists() else None,
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def _holder(path: Path) -> str:
    """Return in words who holds the lock; who has just taken it is about to write that."""
    for _ in range(_LOOKS):
        if path.stat().st_size > 0:
            return _read(path)[0]
        time.sleep(_PAUSE_S)
    return "a run that is starting or ending"


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """Return who wrote a lock's text, in words and as ``this_run`` has it."""
    try:
        owner = dict(parse_json(read_bytes(path)))
        words = f"process {owner['pid']} on {owner['host']}, started {owner['since']}"
    except (ValueError, TypeError, KeyError):
        return f"an unknown run ({LOCK} cannot be read)", {}
    return words, owner
