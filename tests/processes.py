"""Programs that tests start in processes of their own: awaited by what they do, not by the clock.

Only a program that hangs meets a limit, which says what was waited for and what was printed.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from flce_dist.testing.forked_ranks import without_collections

if TYPE_CHECKING:
    from tests.forked_programs import Fork

    Process = subprocess.Popen[Any] | Fork

ROOT = Path(__file__).parent.parent
LAST_RESORT_S = 600.0  # for one step of a test; a slow or busy machine needs a tenth of it


def environment() -> dict[str, str]:
    """That of programs: ranks meet over the loopback, each computes on one core."""
    # torchrun's own store outlives a restart and has the addresses of the old ranks:
    # https://github.com/pytorch/pytorch/issues/135712
    mine = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | mine


def torchrun(*program: str, nodes: int = 1) -> list[str]:
    """Return the command of two ranks under one agent, or of one of two agents with a rank each."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    if nodes == 1:
        return [*command, "--standalone", "--nproc-per-node", "2", *program]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command += ["--nnodes", str(nodes), "--nproc-per-node", "1", "--max-restarts", "3"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    return [*command, "--rdzv-id", "nodes", "--local-addr", "127.0.0.1", *program]


def start(command: list[str], log: IO[str], forks: bool) -> "Process":
    if forks:
        from tests.forked_programs import Fork  # imports torch

        return Fork(command, environment(), log)
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)


class Running:
    """Processes of one command; ``logs`` has what each prints."""

    def __init__(self, command: list[str], copies: int, logs: Path, forks: bool):
        self.logs = [logs / f"process{i}.log" for i in range(copies)]
        self.processes: list[Process] = []
        for path in self.logs:
            with path.open("w") as log:
                self.processes.append(start(command, log, forks))

    def outputs(self) -> list[str]:
        return [path.read_text(errors="replace") for path in self.logs]  # a kill cuts anywhere

    def until(self, what: str, happened: Callable[[], bool], *, ended: bool = False) -> None:
        """Wait for an event; fail if a process ends before it, unless all have ``ended``."""
        deadline = time.monotonic() + LAST_RESORT_S
        while not happened():
            gone = not ended and any(process.poll() is not None for process in self.processes)
            if gone and not happened():
                self._fail(f"ended before {what}")
            if time.monotonic() > deadline:
                self._fail(f"waited {LAST_RESORT_S:g} s for {what}")
            time.sleep(0.02)

    def finish(self, *, shows: bool = False) -> tuple[list[int], list[str]]:
        """Wait for the end; return exit statuses and outputs.

        ``shows`` prints what the first process does, as it comes, where pytest does not capture.
        """
        with contextlib.ExitStack() as until_end:
            if shows:
                done = threading.Event()
                follower = threading.Thread(target=follow, args=(self.logs[0], done))
                follower.start()
                until_end.callback(follower.join)
                until_end.callback(done.set)
            for process in self.processes:
                try:
                    process.wait(LAST_RESORT_S)
                except subprocess.TimeoutExpired:
                    self._fail(f"waited {LAST_RESORT_S:g} s for the end")
        return [process.wait() for process in self.processes], self.outputs()

    def _fail(self, what: str) -> None:
        pytest.fail("\n".join([what, *self.outputs()]))


def follow(path: Path, done: threading.Event) -> None:
    """Print the lines of a file as they come, until it is done."""
    with path.open() as lines:
        while True:
            is_over = done.wait(0.5)
            for line in lines:
                print(f"  {line}", end="", flush=True)
            if is_over:
                return


@contextlib.contextmanager
def started(
    command: list[str], logs: Path, copies: int = 1, *, forks: bool = False
) -> Iterator[Running]:
    """Start ``copies`` processes, or forks, of a command; nothing that they start outlives them."""
    logs.mkdir(parents=True, exist_ok=True)
    running = Running(command, copies, logs, forks)
    try:
        yield running
    finally:
        for process in running.processes:  # torchrun gives its workers sessions of their own
            kill_all(descendants(process.pid))
            process.wait()


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return a process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid] + [below for child in children for below in descendants(int(child))]


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def forked(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """Start a process and return it with a pipe to it."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    with without_collections():
        process.start()
    theirs.close()
    return process, ours
