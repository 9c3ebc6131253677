"""Ranks that die: the others end or start again, and nobody waits for ever.

Of the training run under torchrun, one process is killed while the other waits for it in a step. Of
bare gloo ranks, one dies or falls silent before a collective of forward or of backward.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist import linear_cross_entropy
from tests import tiny_training

TIMEOUT_S = 3.0  # of the process group of the bare ranks
P = 3
Outcome = tuple[str, float]  # the error, or "" if there was none; seconds until it came


def share(rank: int, store: str, fault: str, where: str, pipe: Connection) -> None:
    """One rank's forward and backward; the last rank is struck by ``fault`` before ``where``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=P,
        store=dist.FileStore(store, P),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    dist.barrier()  # all are there, connected
    hidden, weight = torch.zeros(8, 4, requires_grad=True), torch.zeros(5, 4, requires_grad=True)

    def strike(name: str) -> None:
        if rank == P - 1 and name == where:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    start, error = time.monotonic(), ""
    try:
        strike("forward")
        loss = linear_cross_entropy(hidden, weight, torch.arange(8), tp_group=dist.group.WORLD)
        strike("backward")
        start = time.monotonic()
        loss.backward()
    except RuntimeError as raised:
        error = str(raised)
    pipe.send((error, time.monotonic() - start))
    time.sleep(60)  # what this rank raised, not its end, is what the others must not wait for


def outcomes(store: Path, fault: str, where: str) -> list[Outcome]:
    """What becomes of the ranks that are not struck."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(P)]
    processes = [
        context.Process(target=share, args=(rank, str(store), fault, where, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        results = []
        for ours, _ in pipes[: P if fault == "none" else P - 1]:
            assert ours.poll(30), "a rank waits for ever"
            results.append(ours.recv())
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the forked ranks nor those of torchrun need a network."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside idle threads
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("fault", ["killed", "silent"])
def test_a_rank_that_is_gone_makes_the_others_raise(fault: str, where: str, tmp_path: Path) -> None:
    results = outcomes(tmp_path / "store", fault, where)
    assert len(results) == P - 1
    for error, seconds in results:
        assert error, "a rank went on without another's share"
        # Waiting begins anew with each collective, and a rank may reach one more than another.
        assert seconds < 2 * TIMEOUT_S + 2
    if fault == "silent":
        assert max(seconds for _, seconds in results) > 0.5 * TIMEOUT_S  # it was waited for


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_without_a_fault_none_raises(tmp_path: Path) -> None:
    """What the test above takes for the effect of a fault does not come without one."""
    results = outcomes(tmp_path / "store", "none", "never")
    assert [error for error, _ in results] == [""] * P


def start(out_dir: Path, *, max_restarts: int) -> "subprocess.Popen[Any]":
    """Start the training run of test_train_run.py on two processes."""
    python, *program = runs().command(out_dir)
    assert program[:2] == ["-m", "torch.distributed.run"]
    program[2:2] = ["--max-restarts", str(max_restarts), "--monitor-interval", "0.1"]
    with (out_dir.parent / "output").open("w") as output:
        return subprocess.Popen(
            [python, *program],
            cwd=runs().ROOT,
            # torchrun's own store outlives a restart and has the addresses of the old ranks:
            # https://github.com/pytorch/pytorch/issues/135712
            env=runs().environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def runs() -> Any:
    """How test_train_run.py runs the training; needs packages that the tests above do not."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("mistral_common")
    from tests import test_train_run

    return test_train_run


def until(condition: Callable[[], bool], process: "subprocess.Popen[Any]") -> None:
    deadline = time.monotonic() + 50
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def strike_a_rank(process: "subprocess.Popen[Any]", out_dir: Path) -> None:
    """SIGKILL for rank 1 while rank 0 waits for it, after step 6 and its checkpoint of step 4."""

    def steps() -> int:
        return max((record["step"] for record in tiny_training.records(out_dir)), default=0)

    until(lambda: steps() >= 6, process)
    pid = next(pid for pid in tiny_training.descendants(process.pid) if rank_of(pid) == "1")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)
    reached = steps()
    time.sleep(0.5)  # ten steps' time
    assert steps() == reached < 12, "rank 0 did not wait for rank 1"
    os.kill(pid, signal.SIGKILL)


def rank_of(pid: int) -> str | None:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((v[5:].decode() for v in variables if v.startswith(b"RANK=")), None)


def trained(out_dir: Path, *, max_restarts: int, strike: bool) -> tuple[int, str]:
    """Run to the end; return torchrun's exit code and all output."""
    process = start(out_dir, max_restarts=max_restarts)
    ranks: list[int] = []
    try:
        if strike:
            strike_a_rank(process, out_dir)
            ranks = tiny_training.descendants(process.pid)[1:]
        returncode = process.wait(50)
        if max_restarts == 0:
            assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    finally:
        if process.poll() is None:
            tiny_training.kill(process)
    return returncode, (out_dir.parent / "output").read_text()


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@needs_proc
@pytest.mark.timeout(120)
def test_torchrun_ends_the_others(tmp_path: Path) -> None:
    out_dir = tmp_path / "run"
    returncode, output = trained(out_dir, max_restarts=0, strike=True)
    assert returncode == 1, output
    assert "Signal 9 (SIGKILL)" in output
    assert max(record["step"] for record in tiny_training.records(out_dir)) < 12


@needs_proc
@pytest.mark.timeout(180)
def test_restarted_by_torchrun_it_ends_the_same(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    (tmp_path / "struck").mkdir()
    calm, struck = tmp_path / "calm" / "run", tmp_path / "struck" / "run"
    assert trained(calm, max_restarts=1, strike=False)[0] == 0
    returncode, output = trained(struck, max_restarts=1, strike=True)
    assert returncode == 0, output
    assert output.count("continuing ") == 1
    assert len(tiny_training.records(calm)) > 12
    assert tiny_training.records(struck) == tiny_training.records(calm)
