"""The training run under torchrun: killed without warning it goes on to the same losses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_training import TINY, descendants, is_running, kill, records

pytest.importorskip("megatron.core")
pytest.importorskip("mistral_common")
pytestmark = pytest.mark.timeout(400)  # each start imports for seconds, on a busy machine many

ROOT = Path(__file__).parents[1]


def command(out_dir: Path, *overrides: str) -> list[str]:
    config = out_dir.parent / "tiny.yaml"
    config.write_text(TINY)
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    program += ["--standalone", "-m", "flce_dist.launch.train", "--config", str(config)]
    return [*program, "--out-dir", str(out_dir), *overrides]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def train(out_dir: Path, *overrides: str, returncode: int = 0) -> str:
    process = subprocess.Popen(
        command(out_dir, *overrides),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    assert process.returncode == returncode, output
    return output


def train_and_signal(
    out_dir: Path, *overrides: str, after_step: int, strike: Callable[[list[int]], object]
) -> tuple[int, str]:
    """Start a run and, once it has recorded ``after_step``, ``strike`` at the processes.

    ``strike`` gets torchrun's process id and the ranks'. Returns torchrun's status and the output,
    after all processes have ended.
    """
    with (out_dir.parent / "output").open("w+") as output:
        process = subprocess.Popen(
            command(out_dir, *overrides),
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 300  # far more than it takes

        def until(condition: Callable[[], bool]) -> None:
            while not condition():
                if time.monotonic() > deadline:
                    kill(process)
                    pytest.fail("the run neither went on nor ended")
                time.sleep(0.005)

        until(lambda: process.poll() is not None or last_step(out_dir) >= after_step)
        processes = descendants(process.pid)
        strike(processes)
        until(lambda: process.poll() is not None)
        until(lambda: not any(is_running(pid) for pid in processes))
        output.seek(0)
        return process.wait(), output.read()


def last_step(out_dir: Path) -> int:
    return max((record["step"] for record in records(out_dir)), default=0)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(out_dir, "--compare")
    return out_dir


def test_a_run_learns_and_leaves_its_records(uninterrupted: Path) -> None:
    entries = records(uninterrupted)
    losses = [entry["loss"] for entry in entries if entry["kind"] == "train"]
    validation = [entry for entry in entries if entry["kind"] == "validation"]
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert [entry["step"] for entry in validation] == [4, 8, 12]
    assert validation[-1]["loss"] < validation[0]["loss"]
    assert entries[0]["head_peak_mib"] > 0
    for name in ("loss.png", "compare.png", "compare.json", "tensorboard"):
        assert (uninterrupted / name).exists(), name
    checkpoints = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert checkpoints == ["step-00000008", "step-00000012"]


def test_the_comparison_agrees_with_megatron(uninterrupted: Path) -> None:
    numbers = json.loads((uninterrupted / "compare.json").read_text())
    heads = numbers["heads"]
    assert list(heads) == ["linear_cross_entropy", "with recompute", "Megatron"]
    for head in heads.values():
        assert head["loss"] == pytest.approx(heads["Megatron"]["loss"], rel=1e-6)
        assert head["loss_difference"] < 1e-4
        assert head["dhidden_relative_rms"] < 1e-5 and head["dweight_relative_rms"] < 1e-5
        assert head["time_ms"] > 0
        assert head["peak_mib"] > numbers["gradients_mib"] > 0


def test_killed_stopped_and_continued_it_ends_the_same(uninterrupted: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "run"
    endless = ["--steps", "1000000"]
    # SIGKILL for torchrun alone: its ranks end with it.
    train_and_signal(
        out_dir, *endless, after_step=6, strike=lambda pids: os.kill(pids[0], signal.SIGKILL)
    )
    killed = last_step(out_dir)
    # SIGTERM for one rank: all end, after a checkpoint of that step.
    status, output = train_and_signal(
        out_dir,
        *endless,
        after_step=killed + 2,
        strike=lambda pids: os.kill(pids[-1], signal.SIGTERM),
    )
    assert "ended without giving" in output and "taking it over" in output
    assert f"continuing {out_dir / 'checkpoints' / 'step-'}" in output
    stopped = last_step(out_dir)
    assert output.count(f"SIGTERM: stopped after step {stopped};") == 1
    assert status == 1 and re.search(r"exitcode +: 143 ", output), output

    output = train(out_dir, "--steps", str(stopped + 1))
    assert f"continuing {out_dir / 'checkpoints' / f'step-{stopped:08d}'}" in output
    assert "taking it over" not in output
    entries = records(out_dir)
    steps = [entry["step"] for entry in entries if entry["kind"] == "train"]
    assert steps == list(range(1, stopped + 2))
    expected = [entry for entry in records(uninterrupted) if entry["step"] <= stopped]
    assert expected and entries[: len(expected)] == expected


def test_another_configuration_is_refused_by_one_rank(uninterrupted: Path) -> None:
    before = records(uninterrupted)
    (uninterrupted.parent / "tiny.yaml").write_text(TINY)
    output = train(uninterrupted, "--optimizer.lr", "0.5", returncode=1)
    assert len(re.findall("^error: cannot continue", output, re.MULTILINE)) == 1
    assert "optimizer.lr is 0.03 there and 0.5 here" in output
    assert records(uninterrupted) == before
