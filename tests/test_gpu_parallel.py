"""tests/gpu_parallel.py under torchrun, on GPUs over NCCL and on a CPU over gloo; its mistakes."""

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import gpu_parallel, parallel_ranks
from tests.parallel_mistakes import (
    Plant,
    another_loss_on_rank_1,
    dhidden_not_summed,
    never_the_same,
    rank_1_raises,
)
from tests.parallel_problem import Problem, small_pieces
from tests.parallel_ranks import Ranks, plan_of, problem, ways
from tests.processes import LAST_RESORT_S, started, torchrun

PATIENCE = ["--timeout-s", f"{LAST_RESORT_S:g}"]  # other processes may use CPU and GPUs, too
CPU_CHECKS = [name for name in gpu_parallel.CHECKS if name not in gpu_parallel.GPU_ONLY]
PROGRAM = "tests.gpu_parallel"


def one_way_only(patch: pytest.MonkeyPatch) -> None:
    """For heads; two ranks have all ways."""

    def one_way(one: Problem, P: int) -> dict[str, Any]:
        return {"part cached": ways(one, P)["part cached"]}

    patch.setattr(parallel_ranks, "different_ways", one_way)


def planted(plant: Plant) -> list[str]:
    return ["tests.parallel_mistakes", plant.__name__]


def on_gpus(count: int) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu(count), pytest.mark.alone]


def run_over_gloo(logs: Path, *program: str) -> tuple[int, str]:
    # What torch.compile imports: by this process, once for all ranks.
    importlib.import_module("torch._inductor.lowering")
    command = torchrun("-m", *program, "--device", "cpu")
    with started(command, logs, forks=True) as ranks:
        (status,), (printed,) = ranks.finish()
    return status, printed


def all_passed(names: list[str], world_size: int) -> str:
    return f"{len(names)} of {len(names)} checks passed on {world_size} ranks\nok\n"


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=on_gpus(n)) for n in (2, 4)])
@pytest.mark.parametrize("connections", [None, 1])
def test_checks_pass_over_nccl(connections, world_size, monkeypatch, tmp_path):
    """Every one, and over one connection those of copies beside other work."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    names = list(gpu_parallel.CHECKS)
    if connections:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(connections))
        names = list(gpu_parallel.BESIDE_OTHER_WORK)
    # NCCL's threads read the agent's store until the end; that of rank 0 would be gone.
    command = ["env", "-u", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", sys.executable]
    command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += ["-m", PROGRAM, "--device", "cuda", *PATIENCE, "--checks", *names]
    with started(command, tmp_path) as ranks:
        (status,), (printed,) = ranks.finish()
    print(printed)
    assert status == 0 and all_passed(names, world_size) in printed, printed


def test_every_check_passes_over_gloo(tmp_path):
    status, printed = run_over_gloo(tmp_path, PROGRAM, *PATIENCE)
    assert status == 0 and all_passed(CPU_CHECKS, 2) in printed, printed
    for name in CPU_CHECKS:
        assert f"{name}: ok (" in printed


@pytest.mark.parametrize(
    ("check", "plant"), [("subgroups", None), ("heads", one_way_only), ("check_ranks", None)]
)
def test_on_four_ranks(check, plant, pools):
    assert pools[4].run(found_with, check, plant) == [[]] * 4


@pytest.mark.parametrize("P", [2, 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fewer", [0, 61, 66])
def test_ways_are_what_they_are_called(fewer, device, P):
    one = problem(torch.device(device))
    one = one.changed(V_all=one.V_all - fewer)
    with small_pieces() if device == "cpu" else contextlib.nullcontext():
        plans = {way: plan_of(one, P, options) for way, options in ways(one, P).items()}
    V = plans["cached"].V
    cached = {way: found.cached_v for way, found in plans.items()}
    assert cached["recompute"] == 0 and cached["cached"] == V
    assert 0 < cached["part cached"] < V
    assert len(plans["in_forward"].chunks()) == 1 < len(plans["in_forward, chunks"].chunks())


# --- planted mistakes

# For each comparison that checks share: a check, a mistake, and what the check says of it.
MISTAKES: list[tuple[str, Plant, str]] = [
    ("bits", never_the_same, "part cached, SP, repeat 1: loss, dhidden, dweight, dbias not the"),
    ("empty", another_loss_on_rank_1, "no rows: cached, SP: loss differs between ranks"),
]


def found_with(group: dist.ProcessGroup, check: str, plant: Plant | None) -> list[str]:
    ranks = Ranks(group, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        return gpu_parallel.run_check(gpu_parallel.CHECKS[check], ranks).messages


@pytest.mark.parametrize(("check", "plant", "message"), MISTAKES)
def test_a_mistake_is_found(check, plant, message, pools):
    for found in pools[2].run(found_with, check, plant):
        assert any(message in line for line in found), found


def test_the_program_names_what_failed(tmp_path):
    program = [*planted(dhidden_not_summed), "--checks", "gradients", "check_ranks"]
    status, printed = run_over_gloo(tmp_path, *program, *PATIENCE)
    assert status == 1
    assert "gradients: FAILED (" in printed
    for rank in range(2):
        assert f"\n  rank {rank}: even, mean: recompute, SP: dhidden: error" in printed
    assert "\ncheck_ranks: ok (" in printed
    assert "1 of 2 checks passed on 2 ranks\nfailed or not run: gradients\n" in printed


def test_a_rank_that_fails_alone_does_not_hang_the_others(tmp_path):
    program = [*planted(rank_1_raises), "--checks", "bits", "memory"]
    status, printed = run_over_gloo(tmp_path, *program)
    assert status == 1
    assert "FAILED (" in printed
    assert "\n  rank 1: Traceback" in printed and "ArithmeticError: only here" in printed
    assert "\n  rank 0: Traceback" in printed  # waited for rank 1 in a collective
    assert "memory: " not in printed
    assert "failed or not run: bits, memory" in printed
    assert "rank 1 raised Traceback" in printed
