"""tests/gpu_parallel.py under torchrun, on GPUs over NCCL and on a CPU over gloo; its mistakes."""

import contextlib
import importlib
import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flce_dist import api
from tests import gpu_parallel, parallel_ranks
from tests.parallel_problem import chunks_of, small_chunks
from tests.parallel_ranks import Ranks, plan_of, problem, ways
from tests.processes import LAST_RESORT_S, started, torchrun

PATIENCE = ["--timeout-s", f"{LAST_RESORT_S:g}"]  # other processes may use CPU and GPUs, too
CPU_CHECKS = [name for name in gpu_parallel.CHECKS if name not in gpu_parallel.GPU_ONLY]
PROGRAM = "tests.gpu_parallel"


def gpus(count: int) -> Any:
    return pytest.param(count, marks=[pytest.mark.gpu(count), pytest.mark.alone])


def all_passed(names: Sequence[str], world_size: int) -> str:
    return f"{len(names)} of {len(names)} checks passed on {world_size} ranks\nok\n"


AT_ONCE = (
    ("memory", "gradients"),
    ("bits", "streams", "devices", "graphs", "host"),
    ("filtered", "compile"),
    ("scores", "collectives", "first_call"),
    ("divergences",),
    ("best_ids", "empty", "subgroups", "heads", "checkpointing"),
)
"""Checks of one torchrun each, side by side: with cold caches they mostly compile."""


@pytest.mark.parametrize("world_size", [gpus(2), gpus(4)])
@pytest.mark.parametrize("connections", [None, 1])
def test_checks_pass_over_nccl(connections, world_size, monkeypatch, tmp_path):
    """Every one, and over one connection those of copies beside other work."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    names_at_once: tuple[tuple[str, ...], ...] = AT_ONCE
    if connections:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(connections))
        names_at_once = (gpu_parallel.BESIDE_OTHER_WORK,)
    # NCCL's threads read the agent's store until the end; that of rank 0 would be gone.
    command = ["env", "-u", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", sys.executable]
    command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += ["-m", PROGRAM, "--device", "cuda", *PATIENCE, "--checks"]
    with contextlib.ExitStack() as until_end:
        all_ranks = [
            until_end.enter_context(started([*command, *names], tmp_path / names[0]))
            for names in names_at_once
        ]
        pool = until_end.enter_context(ThreadPoolExecutor())
        ends = list(pool.map(lambda ranks: ranks.finish(shows=True), all_ranks))
    for names, ((status,), (printed,)) in zip(names_at_once, ends, strict=True):
        assert status == 0 and all_passed(names, world_size) in printed, printed


def test_every_check_is_of_one_torchrun():
    assert sorted(itertools.chain(*AT_ONCE)) == sorted(gpu_parallel.CHECKS)


def test_every_check_passes_over_gloo(tmp_path):
    # What torch.compile imports: by this process, once for all ranks.
    importlib.import_module("torch._inductor.lowering")
    command = torchrun("-m", PROGRAM, *PATIENCE, "--device", "cpu")
    with started(command, tmp_path, forks=True) as ranks:
        (status,), (printed,) = ranks.finish()
    assert status == 0 and all_passed(CPU_CHECKS, 2) in printed, printed
    for name in CPU_CHECKS:
        assert f"{name}: ok (" in printed


def check_rank(group: dist.ProcessGroup, check: str) -> list[str]:
    def one_way(one: Any, P: int) -> dict[str, Any]:  # two ranks have all
        return {"part cached": ways(one, P)["part cached"]}

    with mock.patch.object(parallel_ranks, "different_ways", one_way):
        given = Ranks(group, torch.device("cpu"))
        found = gpu_parallel.run_check(gpu_parallel.CHECKS[check], given)
    return found.messages


@pytest.mark.parametrize("check", ["subgroups", "heads", "first_call", "best_ids"])
def test_on_four_ranks(check, pools):
    assert pools[4].run(check_rank, check) == [[]] * 4


@pytest.mark.parametrize("P", [2, 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fewer", [0, 61, 66])
def test_ways_are_what_they_are_called(fewer, device, P):
    one = problem(torch.device(device))
    one = one.changed(V_all=one.V_all - fewer)
    with small_chunks() if device == "cpu" else contextlib.nullcontext():
        plans = {way: plan_of(one, P, options) for way, options in ways(one, P).items()}
    V = plans["cached"].V
    cached = {way: found.cached_v for way, found in plans.items()}
    assert cached["recompute"] == 0 and cached["cached"] == V
    assert 0 < cached["part cached"] < V
    some = [len(chunks_of(plans[way])) for way in ("in_forward", "in_forward, chunks")]
    assert some[0] == 1 < some[1]


def never_the_same() -> Any:
    calls, op = itertools.count(), api.linear_cross_entropy
    return lambda *args, **options: op(*args, **options) * (1 + 1e-3 * next(calls))


def another_loss_on_rank_1() -> Any:
    op = api.linear_cross_entropy
    return lambda *args, **options: op(*args, **options) * (1 + 3e-7 * dist.get_rank())


def planted_rank(group: dist.ProcessGroup, check: str, plant: Any) -> list[str]:
    with mock.patch.object(api, "linear_cross_entropy", plant()):
        return check_rank(group, check)


@pytest.mark.parametrize(("check", "plant", "message"), [
    ("bits", never_the_same, "part cached, SP, repeat 1: loss, dhidden, dweight, dbias not"),
    ("empty", another_loss_on_rank_1, "no rows: cached, SP: loss differs between ranks"),
])  # fmt: skip
def test_a_mistake_is_found(check, plant, message, pools):
    """One for each comparison that checks share: of bits, and against fp64."""
    for found in pools[2].run(planted_rank, check, plant):
        assert any(message in line for line in found), found


def wrong_rank(group: dist.ProcessGroup) -> tuple[bool, str]:
    """A check that finds something on rank 1, one that finds nothing, one that raises there."""

    def raises_on_rank_1(ranks: Ranks) -> Iterator[str]:
        if ranks.rank == 1:
            raise ArithmeticError("only here")
        yield from ()

    checks = {
        "wrong": lambda ranks: iter(["off"] * ranks.rank),
        "right": lambda ranks: iter([]),
        "raises": raises_on_rank_1,
        "later": lambda ranks: iter([]),
    }
    printed = io.StringIO()
    with mock.patch.dict(gpu_parallel.CHECKS, checks), contextlib.redirect_stdout(printed):
        passed = gpu_parallel.run_checks(list(checks), Ranks(group, torch.device("cpu")), group)
    return passed, printed.getvalue()


def test_the_program_names_what_failed_and_ends_where_ranks_are_out_of_step(ranks):
    (passed, printed), other = ranks.run(wrong_rank)
    assert not passed and other == (False, "")
    wrong, rest = printed.split("right: ok (")
    assert wrong.startswith("wrong: running\nwrong: FAILED (")
    assert wrong.endswith("\n  rank 1: off\nright: running\n")
    assert "\n  rank 1: Traceback" in rest and "ArithmeticError: only here" in rest
    assert "later: running" not in rest
    end = "1 of 4 checks passed on 2 ranks\nfailed or not run: wrong, raises, later\n"
    assert rest.endswith(end)
