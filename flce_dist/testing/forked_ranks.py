"""Simulated ranks as forked processes with gloo: real collectives, real processes, no network.

Workers are forked, not spawned, because a spawned one would spend seconds importing torch. So a
process that has already used CUDA cannot start them. Each worker has one torch thread, a default
process group over the loopback device, and a pipe to the caller that carries pickled arguments and
results.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

_GRACE_S = 0.2  # a rank that dies causes errors in others, which may be seen before its exit code


class RankFailed(RuntimeError):
    """A simulated rank failed; the message has its number and its traceback or exit code."""


class RankPool:
    """Forked gloo workers that serve many calls; once they run, a call takes milliseconds.

    A context manager. Workers start at the first ``run``, and again after a failed one. The
    function and its arguments are pickled, so it must be a module-level function or a partial of
    one. ``run_ranks(..., backend="gloo")`` takes closures, but forks workers for each call::

        @pytest.fixture(scope="module")
        def ranks():
            with RankPool(2) as pool:
                yield pool

        def test_sum(ranks):
            assert ranks.run(all_reduce_rank) == [1, 1]
    """

    def __init__(self, world_size: int, *, timeout_s: float = 60.0):
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "RankPool":
        return self

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
        return self._call(task)

    def run_closure(self, fn: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
        """Like ``run`` for a closure, which workers get by being forked: the pool must be new."""
        if self._processes:
            raise RuntimeError("run_closure needs a pool whose workers have not started yet")
        self._start(fn)
        return self._call(pickle.dumps(None))

    def close(self) -> None:
        """End the workers; a later ``run`` starts new ones."""
        for pipe in self._pipes:
            pipe.close()  # an idle worker ends at once, a stuck one is killed
        for process in self._processes:
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        if self._store is not None:
            self._store.cleanup()
            self._store = None

    def _call(self, task: bytes) -> list[Any]:
        if not self._processes:
            self._start(None)
        try:
            for rank, pipe in enumerate(self._pipes):
                try:
                    pipe.send_bytes(task)
                except BrokenPipeError:
                    raise self._death(rank) from None
            return self._collect()
        except BaseException:
            for process in self._processes:
                process.kill()
            self.close()
            raise

    def _start(self, closure: Callable[[dist.ProcessGroup], Any] | None) -> None:
        if torch.cuda.is_initialized():
            raise RuntimeError(
                "forked ranks need a process that has not used CUDA; this one has: use "
                'backend="threads", or torchrun for ranks on GPUs'
            )
        self._store = tempfile.TemporaryDirectory(prefix="flce_dist_ranks_")
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(self.world_size)]
        self._pipes = [ours for ours, _ in pipes]
        with warnings.catch_warnings():
            # Python 3.12 warns of threads, which torch keeps idle; workers use none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            for rank in range(self.world_size):
                inherited = self._pipes + [end for r, (_, end) in enumerate(pipes) if r != rank]
                process = context.Process(
                    target=_worker,
                    args=(rank, self.world_size, pipes[rank][1], inherited),
                    kwargs=dict(store=self._store.name, timeout_s=self.timeout_s, closure=closure),
                    daemon=True,
                )
                process.start()
                self._processes.append(process)
        for _, theirs in pipes:
            theirs.close()

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        rank_of: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + self.timeout_s
        while len(results) < self.world_size:
            pending = [pipe for pipe, rank in rank_of.items() if rank not in results]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                stuck = [rank for rank in range(self.world_size) if rank not in results]
                where = {rank: self._stack(rank) for rank in stuck}
                raise TimeoutError(unfinished(self.world_size, where, self.timeout_s))
            for pipe in ready:
                rank = rank_of[pipe]
                try:
                    ok, value = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise self._death(rank) from None
                if not ok:
                    self._raise(rank, *value)
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def _raise(self, rank: int, error: BaseException | None, report: str) -> None:
        sentinels = [process.sentinel for process in self._processes]
        for dead in wait(sentinels, _GRACE_S):
            raise self._death(sentinels.index(dead))  # type: ignore[arg-type]
        failed = RankFailed(f"rank {rank} of {self.world_size} raised\n{report}")
        if error is None:
            raise failed
        raise error from failed

    def _stack(self, rank: int) -> str:
        """Return a rank's present stack, which it writes to a file on a signal."""
        assert self._store is not None
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        time.sleep(_GRACE_S)
        return (Path(self._store.name) / f"stack{rank}").read_text()

    def _death(self, rank: int) -> RankFailed:
        process = self._processes[rank]
        process.join(_GRACE_S)
        code = process.exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
        return RankFailed(f"rank {rank} of {self.world_size} {how} before it returned")


def unfinished(world_size: int, where: dict[int, str], timeout_s: float) -> str:
    """Return the message of a timeout; ``where`` has the stack of each rank still running."""
    ranks = ", ".join(str(rank) for rank in where)
    stacks = "".join(f"\nrank {rank} is at\n{stack}" for rank, stack in where.items())
    return f"ranks {ranks} of {world_size} did not finish within {timeout_s:g} s{stacks}"


def _worker(
    rank: int,
    world_size: int,
    pipe: Connection,
    inherited: list[Connection],
    *,
    store: str,
    timeout_s: float,
    closure: Callable[[dist.ProcessGroup], Any] | None,
) -> None:
    """Serve calls until the pipe closes, because the caller closed it or has ended."""
    gc.freeze()  # collecting a process group of the caller's would wait for threads not forked
    for end in inherited:
        end.close()  # if held open here, a sibling would not notice that the caller has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles it and ends the workers
    stack_file = (Path(store) / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
    torch.set_num_threads(1)  # and no OpenMP region: its threads did not survive the fork
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    _forget_inherited_groups()
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if not dist.is_initialized():
                dist.init_process_group(
                    "gloo",
                    rank=rank,
                    world_size=world_size,
                    store=dist.FileStore(str(Path(store) / "store"), world_size),
                    # The caller's own timeout comes first and names every rank that is late.
                    timeout=timedelta(seconds=2 * timeout_s),
                )
            fn, args, kwargs = (closure, (), {}) if task is None else task
            assert fn is not None
            reply = pickle.dumps((True, _portable(fn(dist.group.WORLD, *args, **kwargs))))
        except BaseException as error:
            reply = _pickled_error(error)
        try:
            pipe.send_bytes(reply)
        except BrokenPipeError:
            return


def _forget_inherited_groups() -> None:
    """Drop the caller's process groups, whose connections a fork must not use."""
    if dist.is_initialized():
        c10d = dist.distributed_c10d
        c10d._world = c10d._World()
        c10d.GroupMember.WORLD = None


def _loopback() -> str:
    """Return the loopback device's name: simulated ranks need no network and no host name."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _portable(result: Any) -> Any:
    """Detach and copy tensors, so that only their values are sent, not storage or history."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), result)


def _pickled_error(error: BaseException) -> bytes:
    report = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        reply = pickle.dumps((False, (error, report)))
        pickle.loads(reply)  # some exceptions can be pickled but not unpickled
    except Exception:
        reply = pickle.dumps((False, (None, report)))
    return reply
