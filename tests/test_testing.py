"""Simulated ranks: results, failures that name their rank, and the error budget's own honesty."""

import contextlib
import gc
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.util import register_after_fork
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flce_dist.testing import (
    RankFailed,
    RankPool,
    ThreadedGroup,
    assert_within_budget,
    error_budget,
    relative_rms,
    run_ranks,
)

BACKENDS: list[Literal["threads", "gloo"]] = ["threads", "gloo"]


class Unpicklable(Exception):
    def __init__(self, code: int, reason: str):
        super().__init__(f"{code}: {reason}")  # pickle would call it with one argument


def raise_unpicklable() -> None:
    raise Unpicklable(7, "no")


def sums(group: dist.ProcessGroup, start: int = 0) -> tuple[int, torch.Tensor]:
    x = torch.full((2,), float(start + group.rank()))
    dist.all_reduce(x, group=group)
    return group.rank(), x


def fail_on_rank_1(group: dist.ProcessGroup) -> None:
    if group.rank() == 1:
        raise ValueError("weight must be [V, H]")
    dist.barrier()


def die_on_rank_1(group: dist.ProcessGroup) -> None:
    if group.rank() == 1:
        os._exit(3)
    dist.barrier()


def process(group: dist.ProcessGroup) -> int:
    return os.getpid()


@pytest.mark.parametrize("backend", BACKENDS)
def test_subgroups_that_are_strided(backend):
    def rank(group):
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        x = torch.tensor([float(group.rank())], requires_grad=True)
        (dx,) = torch.autograd.grad(x * x, x)
        dist.all_reduce(dx, dist.ReduceOp.MAX, group=groups[group.rank() % 2])
        return dx.item()

    assert run_ranks(rank, 4, backend=backend) == [4, 6, 4, 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_raising_rank_is_named_and_its_exception_kept(backend):
    with pytest.raises(ValueError, match=r"weight must be \[V, H\]") as caught:
        run_ranks(fail_on_rank_1, 3, backend=backend)
    cause = caught.value.__cause__
    assert isinstance(cause, RankFailed) and "rank 1 of 3" in str(cause)
    assert "fail_on_rank_1" in str(cause)  # the traceback
    assert not dist.is_initialized()


@pytest.mark.parametrize(("end", "said"), [
    (lambda: os._exit(3), "rank 1 of 3 ended with exit code 3"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 of 3 was killed by SIGKILL"),
    (raise_unpicklable, r"rank 1 of 3 raised[\s\S]*Unpicklable: 7: no"),
])  # fmt: skip
def test_a_failed_rank_ends_the_others_and_is_named(end, said):
    def rank(group):
        if group.rank() == 1:
            end()
        dist.barrier()

    with pytest.raises(RankFailed, match=said):  # not TimeoutError
        run_ranks(rank, 3, backend="gloo")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_timeout_names_the_late_ranks_and_where_they_are(backend):
    awake = threading.Event()

    def oversleep(group):
        if group.rank() == 1:
            awake.wait()

    for timeout_s in (0.5, 8.0, 64.0):  # on a busy machine rank 0 may need more, too
        with pytest.raises(TimeoutError, match=f"did not finish within {timeout_s:g} s") as caught:
            run_ranks(oversleep, 2, backend=backend, timeout_s=timeout_s)
        if str(caught.value).startswith("rank 1 of 2"):
            break
    awake.set()
    assert str(caught.value).startswith("rank 1 of 2") and "oversleep" in str(caught.value)


def test_a_thread_that_begins_late_leaves_no_default_group(monkeypatch):
    threads, init = [], dist.init_process_group

    def late(*args: Any, **kwargs: Any) -> None:
        threads.append(threading.current_thread())
        time.sleep(0.5)
        init(*args, **kwargs)

    monkeypatch.setattr(dist, "init_process_group", late)
    with contextlib.suppress(TimeoutError):
        run_ranks(dist.get_rank, 2, timeout_s=0.1)
    for thread in threads:
        thread.join()
    assert len(threads) == 2 and not dist.is_initialized()


@pytest.mark.parametrize(("of_rank_1", "said"), [
    (lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
     r"rank 0: allreduce SUM .*; rank 1: allreduce MAX"),
    (lambda x: dist.barrier(), r"rank 0: allreduce SUM .*; rank 1: barrier; rank 2: allreduce"),
    (lambda x: dist.all_to_all_single(x[:3], x[:3]), "rank 1: alltoall float32"),
    (lambda x: dist.scatter(x, src=0), r"rank 1: scatter from 0 float32\[4\]"),
    (lambda x: dist.gather(x, dst=0), r"rank 1: gather to 0 float32\[4\]"),
    (lambda x: dist.send(x, 0), 'threads have no send: pass backend="gloo"'),
    (lambda x: dist.recv(x), 'threads have no recv: pass backend="gloo"'),
    (lambda x: dist.reduce(x, 0), 'threads have no reduce: pass backend="gloo"'),
    (lambda x: None, r"waits in allreduce .* but rank 1 has returned"),
])  # fmt: skip
def test_threads_name_a_rank_that_does_something_else(of_rank_1, said):
    def rank(group):
        call = of_rank_1 if group.rank() == 1 else dist.all_reduce
        call(torch.ones(4))

    with pytest.raises(RuntimeError, match=said):
        run_ranks(rank, 3)


def test_threads_list_each_ranks_collectives():
    def rank(group):
        assert isinstance(group, ThreadedGroup)
        dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX)
        dist.all_gather_into_tensor(torch.empty(4, dtype=torch.bfloat16), torch.ones(2).bfloat16())
        return group.calls

    assert run_ranks(rank, 2) == [["allreduce MAX float32[4]", "allgather bfloat16[2]"]] * 2


def test_threads_compare_and_list_the_rarer_collectives():
    def rank(group):
        here = group.rank()
        both, one = torch.zeros(2), torch.zeros(1)
        values = [torch.tensor([float(10 * here + i)]) for i in range(2)]
        dist.scatter(one, values if here == 0 else None, src=0)
        to = [torch.zeros(1), torch.zeros(1)] if here == 1 else None
        dist.gather(one, to, dst=1)
        dist.all_to_all_single(both, torch.cat(values))
        uneven = torch.zeros(2 * (here + 1))  # rank r gets r + 1 from each
        dist.all_to_all_single(uneven, torch.ones(3), [here + 1] * 2, [1, 2])
        dist.all_to_all(list(values), values)
        dist.barrier()
        return one.item(), both.tolist(), uneven.tolist(), group.calls

    calls = ["scatter from 0 float32[1]", "gather to 1 float32[1]", "alltoall float32[2]"]
    calls += ["alltoall float32[3]", "alltoall float32[2]", "barrier"]
    results = [(0.0, [0.0, 10.0], [1.0] * 2, calls), (1.0, [1.0, 11.0], [1.0] * 4, calls)]
    assert run_ranks(rank, 2) == results


def test_a_pool_keeps_its_workers_until_one_fails():
    with RankPool(2) as pool:
        pids = pool.run(process)
        assert pool.run(process) == pids
        for failing, error in ((fail_on_rank_1, ValueError), (die_on_rank_1, RankFailed)):
            with pytest.raises(error):
                pool.run(failing)
            assert [x.tolist() for _, x in pool.run(sums, start=5)] == [[11, 11]] * 2
        pids += pool.run(process)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_pool_refuses_a_closure_and_says_what_takes_one():
    with RankPool(2) as pool, pytest.raises(ValueError, match=r"picklable for RankPool.*closures"):
        pool.run(lambda group: None)


def product(group: dist.ProcessGroup | None = None) -> float:
    return (torch.ones(6, 16) @ torch.ones(16, 70)).sum().item()


def test_a_worker_multiplies_though_threads_did_just_before():
    """They may be ending still when it is forked; without a wait one in some 50 hangs."""
    for _ in range(60):
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: product(), range(100)))
        with RankPool(1, timeout_s=20) as rank:
            assert rank.run(product) == [6 * 16 * 70]


def test_ranks_work_beside_a_group_of_the_caller(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        for backend in BACKENDS:
            assert [r for r, _ in run_ranks(sums, 2, backend=backend)] == [0, 1]
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def collect(group: dist.ProcessGroup) -> int:
    gc.collect()
    return group.rank()


def test_what_the_caller_has_left_to_collect_stays_with_it():
    """Also at a fork's first collection, which begins here at once."""
    dist.init_process_group("gloo", store=(store := dist.HashStore()), rank=0, world_size=1)
    usual = gc.get_threshold()
    gc.set_threshold(10**9)
    register_after_fork(store, lambda _: gc.set_threshold(1))
    try:
        dist.all_reduce(torch.ones(1))
        cycle: list[Any] = [dist.group.WORLD]
        cycle.append(cycle)
        dist.destroy_process_group()
        del cycle
        assert run_ranks(collect, 2, backend="gloo") == [0, 1] and gc.isenabled()
    finally:
        gc.set_threshold(*usual)


@pytest.mark.parametrize(("kwargs", "said"), [
    *(({"world_size": wrong}, f"world_size must be an int within [1, 2**63), got {wrong!r}")
      for wrong in (0, "2", 2.0, True)),
    *(({"world_size": 2, "timeout_s": wrong}, f"timeout_s must be a float above 0, got {wrong!r}")
      for wrong in (-1, 0, True, "1", float("inf"), float("nan"))),
    ({"world_size": 2, "backend": "mpi"}, 'backend must be "threads" or "gloo", got \'mpi\''),
])  # fmt: skip
def test_wrong_arguments_are_named(kwargs, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        run_ranks(sums, **kwargs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_of_ranks_of_numpy(backend):
    assert len(run_ranks(sums, np.int64(2), backend=backend)) == 2


def modes(group: Any) -> tuple[Any, ...]:
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    device = torch.empty(0).device.type
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, device


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", [
    torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.float16),
    lambda: torch.device("meta"), contextlib.nullcontext,
])  # fmt: skip
def test_ranks_begin_in_the_modes_of_the_caller(mode, backend):
    with mode():
        assert run_ranks(modes, 2, backend=backend) == 2 * [modes(dist.group.WORLD)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_a_thread_runs_the_backward_of_its_rank(mode):
    """On GPUs, too, where autograd's threads would make collectives of no group."""
    with mode():
        assert run_ranks(lambda _: torch._C._is_multithreading_enabled(), 2) == [False, False]


def test_the_error_budget():
    """It passes what rounds as eager does, and nothing that is wrong."""
    torch.manual_seed(0)
    hidden, dlogits = torch.randn(64, 32).bfloat16(), torch.randn(64, 128).bfloat16()
    reference, eager = dlogits.double().T @ hidden.double(), dlogits.T @ hidden
    assert_within_budget(eager, reference, eager)
    assert_within_budget(reference.float(), reference, eager)
    assert error_budget(reference, reference, eager).error == 0
    one_nan = eager.index_fill(0, torch.tensor([3]), torch.nan)
    for wrong in (0 * eager, eager * 1.05, torch.cat([0 * eager[:1], eager[1:]]), one_nan):
        with pytest.raises(AssertionError, match=r"dweight: error .* exceeds budget"):
            assert_within_budget(wrong, reference, eager, name="dweight")
    with pytest.raises(AssertionError):  # a broken eager grants nothing
        assert_within_budget(eager * 1.1, reference, eager * torch.nan)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1.0, 1e200, 1e300])
def test_errors_are_relative_however_small_or_large_the_reference(scale):
    """In fp64 squares of a number below 1e-162 are 0, and of one above 1e154 infinite."""
    reference = scale * torch.linspace(-1, 1, 16, dtype=torch.float64)
    assert_within_budget(reference * (1 + 1e-16), reference, reference)
    assert relative_rms(reference * 1.01, reference) == pytest.approx(0.01)
    one_nan = reference.index_fill(0, torch.tensor([3]), torch.nan)
    for wrong in (0 * reference, reference * 1.01, torch.ones(16), one_nan, reference / 0):
        with pytest.raises(AssertionError, match="exceeds budget"):
            assert_within_budget(wrong, reference, reference)


def test_tensors_that_cannot_be_compared_are_named():
    """A cast to fp64 would drop imaginary parts, and a broadcast compare something else."""
    given: dict[str, Any] = dict.fromkeys(("actual", "reference", "eager"), torch.ones(3))
    for name, x in given.items():
        with pytest.raises(ValueError, match=f"^{name} must be real, got torch.complex64"):
            error_budget(**{**given, name: x.to(torch.complex64)})
    for name in ("actual", "eager"):
        with pytest.raises(
            ValueError, match=rf"^{name} must have reference's shape \(3,\), got \(2,\)"
        ):
            error_budget(**{**given, name: torch.ones(2)})


def test_zeros_are_met_by_zeros_only():
    zeros, empty = torch.zeros(3), torch.empty(0, 4)
    assert_within_budget(empty, empty.double(), empty)
    assert_within_budget(zeros, zeros.double(), zeros)
    assert relative_rms(torch.tensor([0.0, 1e-30, 0.0]), zeros) == float("inf")
    with pytest.raises(ValueError, match=r"shape \(3,\), got \(1,\)"):
        relative_rms(torch.ones(1), torch.ones(3))
