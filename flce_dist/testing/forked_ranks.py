"""Simulated ranks as forked processes with gloo: real collectives, real processes, no network.

Each rank is an executor with one worker. A spawned worker would spend seconds importing torch; one
that is forked cannot come from a process that has used CUDA.
"""

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flce_dist.arguments import values
from flce_dist.torch_private.groups import forget_groups

_GRACE_S = 0.2  # a rank that dies causes errors in others, which may be seen before its exit code
_ENDING_S = 1.0  # for threads that were joined; of others nobody knows when they end
_THREADS = Path("/proc/self/task")  # of this process, where the system has it
_closure: Any = None  # what ``run_closure`` calls, in its workers


class RankFailed(RuntimeError):
    """A simulated rank failed; the message has its number and its traceback or exit code."""


class RankPool(AbstractContextManager["RankPool"]):
    """Forked gloo workers that serve many calls; once they run, a call takes milliseconds.

    A context manager. Workers start at the first ``run``, and again after a failed one. The
    function and its arguments are pickled, so it must be a module-level function or a partial of
    one. ``run_ranks(..., backend="gloo")`` takes closures, but forks workers for each call.

    Process groups that a call makes stay until it destroys them or the pool is closed, each with a
    thread that wakes up a hundred times a second.

    Example::

        with RankPool(2) as ranks:
            sizes = ranks.run(torch.distributed.get_world_size)  # [2, 2]
    """

    def __init__(self, world_size: int, *, timeout_s: float = 60.0):
        self.world_size = values.count("world_size", world_size)
        self.timeout_s = checked_timeout(timeout_s)
        self._executors: list[ProcessPoolExecutor] = []
        self._workers: list[BaseProcess] = []
        self._at_close = ExitStack()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Return ``[fn(group, *args, **kwargs) of rank 0, of rank 1, ...]``.

        Raises and times out as ``run_ranks`` does; the workers are then replaced.
        """
        try:
            task = pickle.dumps((fn, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                "fn and its arguments must be picklable for RankPool (a module-level function; "
                f'run_ranks(..., backend="gloo") takes closures), got {fn!r}: {error}'
            ) from error
        return self._call(task, None)

    def run_closure(self, fn: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
        """Like ``run`` for a closure, which new workers get by being forked."""
        self.close()
        return self._call(None, fn)

    def close(self) -> None:
        """End the workers; a later ``run`` starts new ones."""
        for process in self._workers:
            process.kill()
        self._at_close.close()
        self._executors = []
        self._workers = []

    def _call(self, task: bytes | None, closure: Callable[..., Any] | None) -> list[Any]:
        try:
            if not self._executors:
                self._start(closure)
            self._check_alive(within_s=0)
            futures = [executor.submit(_run, task) for executor in self._executors]
            done, late = wait(futures, self.timeout_s, FIRST_EXCEPTION)
            for rank, future in enumerate(futures):
                if future in done and (error := future.exception()):
                    self._check_alive(within_s=_GRACE_S)
                    failed = RankFailed(f"rank {rank} of {self.world_size} raised{error.__cause__}")
                    if isinstance(error, RankFailed):
                        raise failed
                    raise error from failed
            if late:
                where = self._stacks([futures.index(future) for future in late])
                raise TimeoutError(unfinished(self.world_size, where, self.timeout_s))
            return [pickle.loads(future.result()) for future in futures]
        except BaseException:
            self.close()
            raise

    def _start(self, closure: Callable[..., Any] | None) -> None:
        if torch.cuda.is_initialized():
            raise RuntimeError(
                "forked ranks need a process that has not used CUDA; this one has: use "
                'backend="threads", or torchrun for ranks on GPUs'
            )
        folder = tempfile.TemporaryDirectory(prefix="flce_dist_ranks_")
        self._folder = Path(self._at_close.enter_context(folder))
        fork = multiprocessing.get_context("fork")
        wait_for_ending_threads()
        for rank in range(self.world_size):
            settings = rank, self.world_size, self._folder, self.timeout_s, closure
            executor = ProcessPoolExecutor(1, fork, _start_rank, settings)
            self._executors.append(self._at_close.enter_context(executor))
            (self._folder / f"stack{rank}").touch()
            with without_collections(), warnings.catch_warnings():
                # Python 3.12 warns of threads; workers use none of their locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                executor.submit(os.getpid)  # forks
            self._workers += executor._processes.values()

    def _check_alive(self, *, within_s: float) -> None:
        """Raise if a worker has died, or does so within that time."""
        sentinels = [process.sentinel for process in self._workers]
        for dead in connection.wait(sentinels, within_s):
            rank = sentinels.index(dead)  # type: ignore[arg-type]
            self._executors[rank].shutdown()  # has joined the worker
            code: Any = self._workers[rank].exitcode
            how = f"ended with exit code {code}"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            raise RankFailed(f"rank {rank} of {self.world_size} {how} before it returned")

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Return where ranks are now: they write that to a file on a signal."""
        for rank in ranks:
            os.kill(self._workers[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(_GRACE_S)
        return {rank: (self._folder / f"stack{rank}").read_text() for rank in sorted(ranks)}


def checked_timeout(timeout_s: object) -> Any:
    """Return the seconds as a float; raise ``ValueError`` for what is no time."""
    least = sys.float_info.min
    most = threading.TIMEOUT_MAX
    return values.number("timeout_s", timeout_s, "above 0", least=least, most=most)


@contextmanager
def without_collections() -> Iterator[None]:
    """Leave garbage be: collected in a fork, the caller's groups would wait for their threads."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def wait_for_ending_threads() -> None:
    """Return once threads that were joined are gone, as well as the system tells.

    A thread that Python no longer knows may still be ending, and hold a lock with which MKL frees
    its buffers. In a process forked then nobody opens it: the first GEMM never returns.
    """
    last = time.monotonic() + _ENDING_S
    known = {str(thread.native_id) for thread in threading.enumerate()}
    while any(map(_is_running, _threads() - known)) and time.monotonic() < last:
        time.sleep(0.001)


def _threads() -> set[str]:
    return set(os.listdir(_THREADS)) if _THREADS.is_dir() else set()


def _is_running(thread: str) -> bool:
    try:
        stat = (_THREADS / thread / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    state = stat.rpartition(")")[2].split()[0]  # behind the name, which may hold anything
    return state == "R"


def unfinished(world_size: int, where: dict[int, str], timeout_s: float) -> str:
    """Return the message of a timeout; ``where`` has the stack of each rank still running."""
    ranks = ", ".join(str(rank) for rank in where)
    stacks = "".join(f"\nrank {rank} is at\n{stack}" for rank, stack in where.items())
    kind = "rank" if len(where) == 1 else "ranks"
    return f"{kind} {ranks} of {world_size} did not finish within {timeout_s:g} s{stacks}"


def _start_rank(rank: int, world_size: int, folder: Path, timeout_s: float, closure: Any) -> None:
    """Set up a worker, before its first task."""
    global _closure
    _closure = closure
    gc.freeze()  # what is there to collect is the caller's
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles it and ends the workers
    threading.Thread(target=_end_with_caller, daemon=True).start()
    stack_file = (folder / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
    torch.set_num_threads(1)  # and no OpenMP region: its threads did not survive the fork
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    forget_groups()
    # The caller's own timeout comes first and names every rank that is late.
    timeout = timedelta(seconds=2 * timeout_s)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout
    )


def _end_with_caller() -> None:
    caller: Any = multiprocessing.parent_process()
    caller.join()
    os._exit(1)


class _Values(pickle.Pickler):
    """Pickles of a tensor only its values: no graph, and no storage of which it is a view."""

    def reducer_override(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return NotImplemented
        return x.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _run(task: bytes | None) -> bytes:
    """Return the pickled result of a call in a worker: of tensors only the values."""
    try:
        fn, args, kwargs = pickle.loads(task) if task is not None else (_closure, (), {})
        result = fn(dist.group.WORLD, *args, **kwargs)
        values = io.BytesIO()
        _Values(values, pickle.HIGHEST_PROTOCOL).dump(result)
        return values.getvalue()
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))  # some exceptions can be pickled but not unpickled
        except Exception:
            raise RankFailed("an exception that cannot be pickled") from error
        raise
