"""Python programs as forks of the test process: they find imported what it has imported.

For programs with many imports that a test starts often. torchrun is PyTorch's own, and it, too,
starts its ranks as forks. What only a new interpreter shows (a missing import, a warning of one)
is for a test that starts it once.
"""

import gc
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from typing import IO, Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from flce_dist.testing.forked_ranks import without_collections
from flce_dist.torch_private.groups import forget_groups


class Fork:
    """``python -m MODULE ...`` in a fork: as much of ``subprocess.Popen`` as its callers use."""

    def __init__(self, command: list[str], env: Mapping[str, str], output: IO[Any] | None = None):
        self.returncode: int | None = None
        with without_collections(), warnings.catch_warnings():
            # Python 3.12 warns of threads; programs use none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
            if self.pid == 0:
                gc.freeze()
        if self.pid == 0:
            _become(command, env, output)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return status


def _become(command: list[str], env: Mapping[str, str], output: IO[Any] | None) -> NoReturn:
    status = 1
    try:
        os.setsid()
        if output is not None:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        _be_new(env)
        *options, last = command[1 : 3 + (command[1] == "-u")]
        sys.argv[1:] = command[len(options) + 2 :]
        for name in [last, *sys.argv[1:3]]:  # runpy warns of a module that is there
            sys.modules.pop(name, None)
            sys.modules.pop(f"{name}.__main__", None)
        if options[-1] == "-c":
            exec(last, {"__name__": "__main__"})
        else:
            assert options[-1] == "-m", command
            runpy.run_module(last, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # a child that went on would run the caller's tests
            os._exit(status)


def _be_new(env: Mapping[str, str]) -> None:
    """Leave behind what the caller has set for itself."""
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(fd, "wb", 0, closefd=False), write_through=True) for fd in (1, 2)
    )
    logging.getLogger().handlers.clear()
    forget_groups()
    SubprocessHandler._popen = lambda self, args, env: Fork(list(args), env)  # type: ignore
    # For its log torchrun looks for each frame of the stack in all modules: a second at each start.
    dynamic_rendezvous.get_method_name = lambda: "a method"  # type: ignore
