"""The training run under torchrun: killed without warning it goes on to the same losses."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_training import TINY, kill, records

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


def train_and_kill(out_dir: Path, *, after_step: int) -> None:
    """Start a run and end all its processes by SIGKILL once it has recorded ``after_step``."""
    process = subprocess.Popen(
        command(out_dir),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    deadline = time.monotonic() + 120
    while not any(record["step"] >= after_step for record in records(out_dir)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    kill(process)


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


def test_killed_and_continued_it_ends_the_same(uninterrupted: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "run"
    train_and_kill(out_dir, after_step=6)
    output = train(out_dir)
    assert f"continuing {out_dir / 'checkpoints' / 'step-'}" in output
    assert records(out_dir) == records(uninterrupted)

    # A damaged newest checkpoint: from the one before it, to the same losses again.
    shard = out_dir / "checkpoints" / "step-00000012" / "rank-00001.pt"
    shard.write_bytes(shard.read_bytes()[:-1])
    output = train(out_dir)
    assert "checkpoint step 12 is damaged: rank-00001.pt has other contents" in output
    assert f"continuing {out_dir / 'checkpoints' / 'step-00000008'}" in output
    assert records(out_dir) == records(uninterrupted)


def test_another_configuration_is_refused_by_one_rank(uninterrupted: Path) -> None:
    before = records(uninterrupted)
    (uninterrupted.parent / "tiny.yaml").write_text(TINY)
    output = train(uninterrupted, "--optimizer.lr", "0.5", returncode=1)
    assert len(re.findall("^error: cannot continue", output, re.MULTILINE)) == 1
    assert "optimizer.lr is 0.03 there and 0.5 here" in output
    assert records(uninterrupted) == before
