"""Simulated ranks, here as threads: any closure, milliseconds per call, P up to about 8.

Torch's threaded process group mixes the data of ranks that call different collectives. Here ranks
first compare the collectives, and an error names the rank that differs or has already ended. Async
work completes at once, and all ranks share the default random generator.
"""

import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Generic, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments import values
from flce_dist.testing.forked_ranks import RankFailed, RankPool, checked_timeout, unfinished
from flce_dist.torch_private.groups import threaded_group, threaded_world

Result = TypeVar("Result")

_BACKEND = "flce_threads"
_ALLREDUCE = dist.AllreduceOptions()
_BROADCAST = dist.BroadcastOptions()
_REDUCE_SCATTER = dist.ReduceScatterOptions()
_GATHER = dist.GatherOptions()
_SCATTER = dist.ScatterOptions()
_Group: Any = threaded_group()
_one_world = threading.Lock()  # the threads' world replaces torch's, which is global
_this_rank = threading.local()  # .meeting: the one of this thread's world


class _PeerGone(RuntimeError):
    """This rank waited for one that had ended. The other's error, if any, is reported instead."""


class _Meeting:
    """Where the ranks of one simulated world compare their next collectives."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._gone: dict[int, str] = {}  # global rank -> how it ended
        self._turns = Counter[tuple[str, int]]()  # (group, global rank) -> collectives so far
        # (group, turn) -> global rank -> call
        self._calls = defaultdict[tuple[str, int], dict[int, str]](dict)

    def leave(self, rank: int, how: str) -> None:
        with self._changed:
            self._gone[rank] = how
            self._changed.notify_all()

    def agree(self, group: str, members: list[int], rank: int, call: str) -> None:
        """Return once all members are about to make the same ``call``; raise if they are not."""
        with self._changed:
            self._turns[group, rank] += 1
            calls = self._calls[group, self._turns[group, rank]]
            calls[rank] = call
            self._changed.notify_all()
            while len(calls) < len(members):
                for gone in self._gone.keys() & set(members) - calls.keys():
                    how = self._gone[gone]
                    raise _PeerGone(f"rank {rank} waits in {call}, but rank {gone} {how}")
                self._changed.wait()
        if len(set(calls.values())) > 1:
            listed = "; ".join(f"rank {r}: {calls[r]}" for r in sorted(calls))
            raise RuntimeError(f"ranks disagree on a collective: {listed}")


class ThreadedGroup(_Group):
    """Torch's threaded group that checks every collective and lists it in ``calls``.

    ``calls`` are this rank's, as "allreduce SUM float32[16]", with the size of its input.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.calls: list[str] = []

    def allreduce(self, tensor_list: list[Tensor], opts: Any = _ALLREDUCE) -> Any:
        self._agree(f"allreduce {_op(opts)}", tensor_list)
        return super().allreduce(tensor_list, opts)

    def allgather(self, output_tensors: Any, input_tensor: list[Tensor], *opts: Any) -> Any:
        self._agree("allgather", input_tensor)
        return super().allgather(output_tensors, input_tensor, *opts)

    def reduce_scatter(
        self, output_tensor: Any, scatter_list: list[list[Tensor]], opts: Any = _REDUCE_SCATTER
    ) -> Any:
        self._agree(f"reduce_scatter {_op(opts)}", scatter_list[0])
        return super().reduce_scatter(output_tensor, scatter_list, opts)

    def broadcast(self, tensor_list: list[Tensor], opts: Any = _BROADCAST) -> Any:
        self._agree(f"broadcast from {opts.rootRank}", tensor_list)
        return super().broadcast(tensor_list, opts)

    def allreduce_coalesced(self, tensor_list: list[Tensor], opts: Any = _ALLREDUCE) -> Any:
        self._agree(f"allreduce_coalesced {_op(opts)}", tensor_list)
        return super().allreduce_coalesced(tensor_list, opts)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = _GATHER) -> Any:
        self._agree(f"gather to {opts.rootRank}", input_tensors)
        return super().gather(output_tensors, input_tensors, opts)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = _SCATTER) -> Any:
        self._agree(f"scatter from {opts.rootRank}", output_tensors)
        return super().scatter(output_tensors, input_tensors, opts)

    def alltoall(self, output_tensors: Any, input_tensors: list[Tensor], *opts: Any) -> Any:
        self._agree("alltoall", input_tensors, of_one_size=False)
        return super().alltoall(output_tensors, input_tensors, *opts)

    def all_to_all_single(self, output: Tensor, input: Tensor, *opts: Any) -> Any:
        self._agree("alltoall", [input], of_one_size=False)
        return super().all_to_all_single(output, input, *opts)

    def alltoall_base(self, output: Tensor, input: Tensor, *opts: Any) -> Any:  # in older torch
        self._agree("alltoall", [input], of_one_size=False)
        return super().alltoall_base(output, input, *opts)

    def barrier(self, opts: Any = None) -> Any:
        self._agree("barrier", [])
        return super().allreduce([torch.ones(1)])  # as torch's

    def send(self, *args: Any) -> NoReturn:
        _refuse("send")

    def recv(self, *args: Any) -> NoReturn:
        _refuse("recv")

    def recv_anysource(self, *args: Any) -> NoReturn:
        _refuse("recv")

    def reduce(self, *args: Any) -> NoReturn:
        _refuse("reduce")

    def _agree(self, kind: str, tensors: list[Tensor], *, of_one_size: bool = True) -> None:
        """List a collective, and compare it with the other ranks' of the same turn."""
        dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in tensors})
        call = " ".join([kind, *dtypes])
        size = f"[{sum(x.numel() for x in tensors)}]" if tensors else ""
        self.calls.append(call + size)
        members = dist.get_process_group_ranks(self)
        compared = call + size if of_one_size else call
        _this_rank.meeting.agree(self.pg_name, members, members[self.rank()], compared)


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(f'ranks that are threads have no {name}: pass backend="gloo"')


def run_ranks(
    fn: Callable[[dist.ProcessGroup], Result],
    world_size: int,
    *,
    backend: Literal["threads", "gloo"] = "threads",
    timeout_s: float = 60.0,
) -> list[Result]:
    """Call ``fn(tp_group)`` on each of ``world_size`` simulated ranks; return results by rank.

    Each rank has a default process group of all ranks, which is also ``fn``'s argument:
    ``tp_group.rank()`` says who is calling, and ``torch.distributed.new_group`` makes subgroups.
    Ranks begin in the caller's grad and inference mode, autocast and default device.

    Args:
        fn: any callable, also a closure. Over "threads" ranks share its variables; over "gloo" each
            rank has a copy, and results are pickled, with tensors detached.
        world_size: number of ranks, 1 or more.
        backend: "threads" of this process, or "gloo" over forked processes.
        timeout_s: for ``fn`` on all ranks.

    Raises:
        Exception: the exception that a rank raised. Its cause is a ``RankFailed`` with the rank's
            number and traceback. The other ranks are ended.
        RankFailed: a rank exited or was killed, or its exception cannot be pickled.
        TimeoutError: some ranks did not finish; the message names them.

    Example::

        def loss_of(tp_group):
            start, end = vocab_range(len(weight), tp_group.rank(), tp_group.size())
            return linear_cross_entropy(hidden, weight[start:end], labels, tp_group=tp_group)

        losses = run_ranks(loss_of, 4)  # one of each rank, all equal
    """
    if backend not in ("threads", "gloo"):
        raise ValueError(f'backend must be "threads" or "gloo", got {backend!r}')
    world_size = values.count("world_size", world_size)
    timeout_s = checked_timeout(timeout_s)
    if backend == "gloo":
        with RankPool(world_size, timeout_s=timeout_s) as pool:
            return pool.run_closure(fn)
    return _run_threads(fn, world_size, timeout_s)


def _run_threads(fn: Callable[[Any], Result], world_size: int, timeout_s: float) -> list[Result]:
    # The first exponentials of a process, made by two threads at once, had errors of 4e-6 in 4 of
    # 30 processes on an Intel CPU (torch 2.11); after this line in none of 40.
    torch.ones(1024).exp()
    run = _ThreadedRun(fn, world_size, timeout_s)
    with _one_world, threaded_world(ThreadedGroup):
        excepthook = sys.excepthook  # each init_process_group wraps it once more
        try:
            stuck = run.finish()
        finally:
            sys.excepthook = excepthook
    if run.errors:
        # The first error of a rank that did not merely wait for one that had ended.
        rank, error = min(list(run.errors), key=lambda item: isinstance(item[1], _PeerGone))
        report = "".join(traceback.format_exception(error))
        raise error from RankFailed(f"rank {rank} of {world_size} raised\n{report}")
    if stuck:
        for rank in stuck:
            run.meeting.leave(rank, "has timed out")  # wakes the ranks that wait for each other
        raise TimeoutError(unfinished(world_size, stuck, timeout_s))
    return [run.results[rank] for rank in range(world_size)]


class _ThreadedRun(Generic[Result]):
    """One call of ``fn`` on each rank, a thread of its own."""

    def __init__(self, fn: Callable[[Any], Result], world_size: int, timeout_s: float) -> None:
        self.meeting = _Meeting()
        self.results: dict[int, Result] = {}  # by rank
        self.errors: list[tuple[int, BaseException]] = []  # with their ranks, the first one first
        self._fn = fn
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._store = dist.HashStore()
        self._have_begun = [threading.Event() for _ in range(world_size)]
        self._enter_modes = _modes_of_caller()

    def finish(self) -> dict[int, str]:
        """Run all ranks until they end or time is out; return where those are that did not end."""
        threads = [
            threading.Thread(target=self._run_rank, args=(rank,), daemon=True)
            for rank in range(self._world_size)
        ]
        for thread in threads:
            thread.start()
        # A rank that makes its default group later, without this world, makes the process's.
        for begun in self._have_begun:
            begun.wait()
        deadline = time.monotonic() + self._timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return {rank: _stack(thread) for rank, thread in enumerate(threads) if thread.is_alive()}

    def _run_rank(self, rank: int) -> None:
        _this_rank.meeting = self.meeting
        how = "has returned"
        try:
            self._join_world(rank)
            with ExitStack() as entered:
                self._enter_modes(entered)
                self.results[rank] = self._fn(dist.group.WORLD)
        except BaseException as error:
            how = f"has raised {type(error).__name__}"
            self.errors.append((rank, error))
        self.meeting.leave(rank, how)

    def _join_world(self, rank: int) -> None:
        try:
            dist.init_process_group(
                _BACKEND,
                rank=rank,
                world_size=self._world_size,
                store=self._store,
                timeout=timedelta(seconds=self._timeout_s),
            )
        finally:
            self._have_begun[rank].set()


def _modes_of_caller() -> Callable[[ExitStack], None]:
    """Return what enters, in another thread, those modes of this one that torch keeps by thread."""
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    device = torch.get_default_device()
    autocast = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]

    def enter(stack: ExitStack) -> None:
        # inference_mode(False) turns autograd's own threads on again, which run backward on GPUs
        # and do not know whose group it is.
        if inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype in autocast:
            stack.enter_context(torch.autocast(kind, dtype))
        if device != torch.get_default_device():
            stack.enter_context(device)

    return enter


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""


def _op(opts: Any) -> str:
    return str(opts.reduceOp.op).removeprefix("RedOpType.")


def _create_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    group = ThreadedGroup(rank, world_size)
    # Ranks create a subgroup at different times: none may use it before all members have it.
    if store.add("members", 1) == world_size:
        store.set("all are here", "")
    store.wait(["all are here"], timeout)
    return group


dist.Backend.register_backend(_BACKEND, _create_group, devices=["cpu", "cuda"])
