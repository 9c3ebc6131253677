"""The training run under torchrun: killed without warning it goes on to the same losses.

Two torchrun agents on one machine, joined by a c10d rendezvous, stand for two nodes: ranks are
global, and only ``LOCAL_RANK`` starts anew on each. docs/multi_node.md tells how real nodes start.

The first run starts as a user's does. The others find its libraries imported: they are forks.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

# All of it, so that forks need not import it.
pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
pytest.importorskip("flce_dist.launch.train.run")

from flce_dist.launch.train import data
from flce_dist.launch.train.run import Trainer
from tests.processes import Running, descendants, is_running, kill_all, started, torchrun
from tests.tiny_training import load_once, program, records

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    load_once()
    monkeypatch.setattr(data, "load_tokenizer", load_once)


def output_of(run: Running, status: int = 0) -> str:
    statuses, (output,) = run.finish()
    assert statuses == [status], output
    return output


def train_and_signal(folder: Path, after_step: int, number: int, victim: int) -> tuple[int, str]:
    """Signal torchrun (victim 0) or a rank of a run past ``after_step``, and await the end.

    Returns torchrun's status and the output.
    """
    out_dir = folder / "run"
    endless = torchrun(*program(folder), "--steps", "1000000")
    with started(endless, folder / "logs", forks=True) as run:
        run.until(f"step {after_step}", lambda: last_step(out_dir) >= after_step)
        processes = descendants(run.processes[0].pid)
        try:
            os.kill(processes[victim], number)
            run.finish()
            run.until("the end of ranks", lambda: not any(map(is_running, processes)), ended=True)
        except BaseException:  # pytest.fail's, too
            kill_all(processes)  # ranks without a torchrun are below no process of ours
            raise
        (status,), (output,) = run.finish()
    return status, output


def last_step(out_dir: Path) -> int:
    return max((record["step"] for record in records(out_dir)), default=0)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    with started([sys.executable, *program(folder), "--compare"], folder / "logs") as run:
        output = output_of(run)
    warned = [line for line in output.splitlines() if "Warning" in line and "launch/" in line]
    assert not warned and "everything is in" in output  # a package's own warnings may pass
    assert output.endswith("is loss.png, the comparison of heads compare.png\n")
    return folder / "run"


def test_a_run_learns_and_leaves_its_records(uninterrupted):
    entries = records(uninterrupted)
    losses = [entry["loss"] for entry in entries if entry["kind"] == "train"]
    validation = [entry for entry in entries if entry["kind"] == "validation"]
    assert len(set(losses)) == len(losses) == 9 and losses[-1] < losses[0]
    assert [entry["step"] for entry in validation] == [3, 6, 9]
    assert validation[-1]["loss"] < validation[0]["loss"]
    first, *_ = (uninterrupted / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first)["head_peak_mib"] > 0
    for name in ("loss.png", "compare.png", "compare.json", "tensorboard"):
        assert (uninterrupted / name).exists(), name
    checkpoints = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert checkpoints == ["step-00000006", "step-00000009"]
    heads = json.loads((uninterrupted / "compare.json").read_text())["records"]
    names = [head["head"] for head in heads]
    assert names == ["ours: auto", "ours: recompute, 0.25 MiB", "Megatron"]
    assert all(0 < head["time_ms"] and head["loss_difference"] < 1e-4 for head in heads)


@needs_proc
def test_killed_and_continued_it_ends_the_same(uninterrupted, tmp_path):
    out_dir = tmp_path / "run"
    # torchrun alone is killed: its ranks end with it.
    train_and_signal(tmp_path, 5, signal.SIGKILL, victim=0)
    # One rank is ended: all end.
    status, output = train_and_signal(tmp_path, last_step(out_dir) + 2, signal.SIGTERM, victim=-1)
    assert "ended without giving" in output and "taking it over" in output
    assert f"continuing {out_dir / 'checkpoints' / 'step-'}" in output
    assert status == 1 and re.search(r"exitcode +: -15 ", output), output
    last = last_step(out_dir)

    to_the_end = torchrun(*program(tmp_path), "--steps", str(last + 1))
    with started(to_the_end, tmp_path / "logs", forks=True) as run:
        output = output_of(run)
    assert f"continuing {out_dir / 'checkpoints' / 'step-'}" in output
    said = ["loading libraries, vocabulary and text ...", "building the model: ", "continuing"]
    assert sorted(said, key=output.index) == said and output.count(said[0]) == 1
    entries = records(out_dir)
    steps = [entry["step"] for entry in entries if entry["kind"] == "train"]
    assert steps == list(range(1, last + 2))
    expected = [entry for entry in records(uninterrupted) if entry["step"] <= last]
    assert expected and entries[: len(expected)] == expected


def test_a_rank_killed_on_one_of_two_nodes_restarts_both(uninterrupted, tmp_path, monkeypatch):
    """While the other waits for it in a step, two steps after a checkpoint."""
    out_dir, held = tmp_path / "run", tmp_path / "held"
    train_step = Trainer.train_step

    def held_step(trainer: Trainer) -> dict[str, float]:
        if trainer.step == 5 and os.environ["RANK"] == "1" and not held.is_symlink():
            held.symlink_to(str(os.getpid()))  # to be killed
            signal.pause()
        return train_step(trainer)

    monkeypatch.setattr(Trainer, "train_step", held_step)  # in forks, too
    command = torchrun(*program(tmp_path), nodes=2)
    with started(command, tmp_path / "logs", copies=2, forks=True) as run:
        run.until("rank 1 held", lambda: held.is_symlink() and last_step(out_dir) == 5)
        os.kill(int(os.readlink(held)), signal.SIGKILL)
        statuses, outputs = run.finish()
    assert statuses == [0, 0], outputs
    begun = f"continuing {out_dir / 'checkpoints' / 'step-00000003'}"
    assert sum(begun in output for output in outputs) == 1
    assert records(out_dir) == records(uninterrupted)
    shards = sorted(path.name for path in (out_dir / "checkpoints/step-00000009").glob("rank-*"))
    assert shards == ["rank-00000.pt", "rank-00001.pt"]
