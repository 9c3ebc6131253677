"""tests/gpu_parallel.py under torchrun, on GPUs over NCCL and on a CPU over gloo; planted mistakes.

Over gloo the program runs in forked ranks, which need not import torch again, and once under
torchrun, a fork, too. The mistakes are planted on two gloo ranks; each must be found by its check.
"""

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist.testing import RankPool
from tests import gpu_parallel, parallel_ranks, processes
from tests.parallel_mistakes import (
    Plant,
    all_logits_held,
    another_loss_on_rank_1,
    dhidden_not_summed,
    host_waits,
    never_the_same,
    no_difference_seen,
    nobody_waits_for_a_collective,
    rank_1_raises,
    sums_over_all_ranks,
    sums_over_no_ranks,
)
from tests.parallel_problem import Problem, small_pieces
from tests.parallel_ranks import Ranks, plan_of, problem, ways
from tests.processes import LAST_RESORT_S, started

ROOT = Path(__file__).parents[1]
TIMEOUT_S = LAST_RESORT_S + 60  # more than a collective may take
PATIENCE = ["--timeout-s", f"{LAST_RESORT_S:g}"]  # other processes may use CPU and GPUs, too
CPU_CHECKS = [name for name in gpu_parallel.CHECKS if name not in gpu_parallel.GPU_ONLY]
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
PROGRAM = ["-m", "tests.gpu_parallel"]
PLANTED = ["-m", "tests.parallel_mistakes"]


def one_way_only(patch: pytest.MonkeyPatch) -> None:
    """For heads; two ranks have all ways."""

    def one_way(one: Problem, P: int) -> dict[str, Any]:
        return {"part cached": ways(one, P)["part cached"]}

    patch.setattr(parallel_ranks, "different_ways", one_way)


def on_gpus(count: int) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu(count), pytest.mark.alone]


def torchrun(
    world_size: int, program: list[str], *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end, or until time is over: the agent then ends its workers and says so."""
    kept = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    defaults = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, str(world_size), *program, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**kept, **defaults, **environment},
    ) as agent:  # fmt: skip
        try:
            output = agent.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            agent.terminate()
            output = agent.communicate()
        return subprocess.CompletedProcess(command, agent.returncode, *output)


def ran(
    group: dist.ProcessGroup, port: int, plant: Plant | None, arguments: tuple[str, ...]
) -> tuple[Any, str, str]:
    """Run the program on a forked rank, as torchrun would; return its exit status and outputs."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "RANK": group.rank(),
        "WORLD_SIZE": group.size(),
    }
    dist.destroy_process_group()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        for name, value in variables.items():
            patch.setenv(name, str(value))
        patch.setattr(sys, "argv", ["gpu_parallel", *arguments])
        patch.setattr(os, "_exit", sys.exit)
        if plant is not None:
            plant(patch)
        try:
            status: Any = gpu_parallel.main()
        except SystemExit as ended:
            status = ended.code
    return status, stdout.getvalue(), stderr.getvalue()


def forked(plant: Plant | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program on two forked ranks over gloo; both must end with the same status."""
    # What torch.compile imports: by this process, once for all ranks.
    importlib.import_module("torch._inductor.lowering")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankPool(2) as pool:
        arguments = ("--device", "cpu", *arguments, *PATIENCE)
        (status, *first), (other, *second) = pool.run(ran, store.port, plant, arguments)
    assert status == other, first + second
    stdout, stderr = (mine + theirs for mine, theirs in zip(first, second, strict=True))
    return subprocess.CompletedProcess(list(arguments), status, stdout, stderr)


def failing(done: subprocess.CompletedProcess[str]) -> str:
    """What the program says of failing checks, and what the first rank that raised says.

    Behind that come the errors of ranks that waited for it, and torchrun's. Else their end.
    """
    lines = [line for line in done.stdout.splitlines() if ": ok (" not in line]
    first = re.search(r"^rank \d+ raised ", done.stderr, re.MULTILINE)
    errors = done.stderr[first.start() :][:4000] if first else done.stderr[-4000:]
    return "\n".join(lines + (errors.splitlines() if done.returncode else []))


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=on_gpus(n)) for n in (2, 4)])
@pytest.mark.parametrize("one_connection", [False, True])
def test_every_check_passes_over_nccl(one_connection, world_size):
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if one_connection else {}
    done = torchrun(world_size, PROGRAM, "--device", "cuda", *PATIENCE, **environment)
    print(done.stdout)
    assert done.returncode == 0, failing(done)
    total = len(gpu_parallel.CHECKS)
    assert done.stdout.endswith(f"{total} of {total} checks passed on {world_size} ranks\nok\n")


def test_every_check_passes_over_gloo():
    done = forked(None, "--impl", "eager")
    assert done.returncode == 0, failing(done)
    total = len(CPU_CHECKS)
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:total]] == CPU_CHECKS
    assert done.stdout.endswith(f"{total} of {total} checks passed on 2 ranks\nok\n")


def test_the_first_error_is_shown_before_those_that_follow_from_it():
    said = "warning\nrank 0 raised Traceback\nOutOfMemoryError\n"
    stderr = said + "rank 1 waited in vain\n" * 1000
    done = subprocess.CompletedProcess([], 1, "memory: ok (2.4 s)\ngradients: ", stderr)
    assert failing(done).startswith("gradients: \nrank 0 raised Traceback\nOutOfMemoryError\n")


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


MISTAKES: list[tuple[str, Plant, str]] = [
    ("gradients", dhidden_not_summed, "recompute, SP: dhidden: error"),
    ("gradients", sums_over_no_ranks, "cached: loss: error"),
    ("gradients", another_loss_on_rank_1, "part cached: loss differs between ranks"),
    ("bits", never_the_same, "part cached, repeat 1, SP: loss, dhidden, dweight, dbias not the"),
    ("bits", another_loss_on_rank_1, "repeat 2: loss differs between ranks"),
    ("streams", never_the_same, "cached, two streams, turn 1, SP: loss, dhidden, dweight, dbias"),
    ("graphs", never_the_same, "in_forward, chunks, SP: batch 2: loss, dhidden, dweight, dbias"),
    (
        "graphs",
        never_the_same,
        "in_forward, chunks, SP: after larger calls: loss, dhidden, dweight",
    ),
    ("exceptions", never_the_same, "cached, after row_gradient raised, SP: loss, dhidden, dweight"),
    ("filtered", dhidden_not_summed, "rounds, SP: dhidden: error"),
    ("filtered", sums_over_no_ranks, "one round: kept_share differs between ranks"),
    ("filtered", never_the_same, "rounds, repeat 1, SP: loss, dhidden, dweight, dbias not the"),
    ("empty", another_loss_on_rank_1, "no rows: cached, SP: loss differs between ranks"),
    ("empty", dhidden_not_summed, "no rows: filtered, SP: dhidden: error"),
    ("subgroups", sums_over_all_ranks, "mesh of dp 2 x tp 1: recompute: loss: error"),
    ("heads", never_the_same, "recompute: loss: error"),
    ("heads", never_the_same, "head 0, backward in either order, SP: loss, dhidden, dweight"),
    ("main_grad", never_the_same, "cached, SP: main_grad in torch.float32: error"),
    ("checkpointing", never_the_same, "use_reentrant=True, SP: dhidden, dweight, dbias not"),
    ("checkpointing", never_the_same, "in_forward, chunks, SP: loss: error"),
    ("compile", never_the_same, "cached, SP: loss, dhidden, dweight, dbias not the same bits"),
    ("check_ranks", no_difference_seen, "label_smoothing: check_ranks said None"),
    ("memory", all_logits_held, "MiB beyond gradients"),
]


def found_with(group: dist.ProcessGroup, check: str, plant: Plant | None) -> list[str]:
    """What ``check`` finds here with a planted mistake."""
    ranks = Ranks(group, torch.device("cpu"), "eager")
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        return gpu_parallel.run_check(gpu_parallel.CHECKS[check], ranks).messages


@pytest.mark.parametrize(
    ("check", "plant"), list(dict.fromkeys((check, plant) for check, plant, _ in MISTAKES))
)
def test_a_mistake_is_found(check, plant, pools):
    messages = [text for *mistake, text in MISTAKES if mistake == [check, plant]]
    for found in pools[2].run(found_with, check, plant):
        for message in messages:
            assert any(message in line for line in found), found


def test_each_check_has_a_mistake_to_find():
    assert {check for check, _, _ in MISTAKES} == set(CPU_CHECKS)


def test_the_program_names_what_failed():
    done = forked(dhidden_not_summed, "--checks", "gradients", "check_ranks")
    assert done.returncode == 1
    assert "gradients: FAILED (" in done.stdout
    for rank in range(2):
        assert f"\n  rank {rank}: even, mean: recompute, SP: dhidden: error" in done.stdout
    assert "\ncheck_ranks: ok (" in done.stdout
    end = "1 of 2 checks passed on 2 ranks\nfailed or not run: gradients\n"
    assert done.stdout.endswith(end)


def test_a_rank_that_fails_alone_does_not_hang_the_others(tmp_path):
    command = processes.torchrun(*PLANTED, rank_1_raises.__name__, "--device", "cpu")
    with started([*command, "--checks", "bits", "memory"], tmp_path, forks=True) as program:
        statuses, (printed,) = program.finish()
    assert statuses == [1]
    assert "FAILED (" in printed
    assert "\n  rank 1: Traceback" in printed and "ArithmeticError: only here" in printed
    assert "\n  rank 0: Traceback" in printed  # waited for rank 1 in a collective
    assert "memory: " not in printed
    assert "failed or not run: bits, memory" in printed
    assert "rank 1 raised Traceback" in printed


@pytest.mark.parametrize(
    ("check", "plant", "message"),
    [
        pytest.param("host", host_waits, "synchronizing", marks=on_gpus(2)),
        pytest.param(
            "streams", nobody_waits_for_a_collective, "not the same bits", marks=on_gpus(2)
        ),
        pytest.param("graphs", never_the_same, "not the same bits", marks=on_gpus(2)),
    ],
)
def test_a_mistake_is_found_on_gpus(check, plant, message):
    done = torchrun(2, PLANTED, plant.__name__, "--device", "cuda", "--checks", check)
    assert done.returncode == 1, done.stdout
    assert f"{check}: FAILED (" in done.stdout and message in done.stdout, failing(done)
