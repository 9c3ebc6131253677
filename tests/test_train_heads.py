"""launch/train/heads.py: what it starts, and what it reads from the runs. The runs are written."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flce_dist.launch.about import about
from flce_dist.launch.program import RunError
from flce_dist.launch.train import heads
from flce_dist.launch.train.config import flatten, load_config
from flce_dist.launch.train.log import RUN, RunLog
from flce_dist.launch.write import write_json

CONFIG = "configs/convergence.yaml"
STEPS = 40
ABOUT = about(torch.device("cpu"))


def write_run(config: Any, ms: float) -> None:
    """Leave what a run leaves: slow steps first, later ones of ``ms``, and one that was slow."""
    config.out_dir.mkdir(parents=True)
    facts = {**ABOUT, "hardware": "this", "ranks": 4}
    write_json(config.out_dir / RUN, {**facts, "command": ["python"], "config": flatten(config)})
    log = RunLog(config.out_dir, step=0, steps=config.steps, head_mib=7.0)
    for step in range(1, config.steps + 1):
        step_ms = 1e4 if step <= heads.WARM_UP or step == STEPS else ms
        log.train(step, loss=9.0, step_ms=step_ms, tokens_per_s=1.0, peak_mib=float(step))
    log.validation(config.steps, 8.5)
    log.close()


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The commands that were started; each leaves a run."""
    commands: list[list[str]] = []

    def run(command: list[str]) -> Any:
        commands.append(command)
        write_run(load_config(command[3:]), ms=100.0 * len(commands))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def arguments(out: Path, steps: int = STEPS) -> list[str]:
    return ["--config", CONFIG, "--steps", str(steps), "--out", str(out)]


def test_every_head_makes_the_same_run(started, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parent.parent)
    assert heads.main(arguments(tmp_path / "x")) == 0
    configs = {Path(command[-1]).name: load_config(command[3:]) for command in started}
    ways = {name: (config.head.kind, config.head.schedule) for name, config in configs.items()}
    assert ways == {
        "cached": ("linear_cross_entropy", "cached"),
        "in_forward": ("linear_cross_entropy", "in_forward"),
        "megatron_fused": ("megatron_fused", "auto"),
        "megatron_unfused": ("megatron_unfused", "auto"),
    }
    rest = [{**flatten(config), "head.kind": 0, "head.schedule": 0, "out_dir": 0}
            for config in configs.values()]  # fmt: skip
    assert all(config == rest[0] for config in rest)

    written = json.loads((tmp_path / "x.json").read_text())
    assert written["about"]["commit"] == ABOUT["commit"] and "config" not in written["about"]
    of_heads = {record["head"]: record for record in written["records"]}
    assert list(of_heads) == list(ways)
    assert [x["p50_ms"] for x in of_heads.values()] == [100.0, 200.0, 300.0, 400.0]
    # Two replicas of two ranks, 16 sequences of 2048 tokens each.
    assert of_heads["in_forward"]["tokens_per_s"] == 2 * 16 * 2048 / 0.2
    assert of_heads["cached"]["peak_mib"] == STEPS and of_heads["cached"]["head_mib"] == 7.0
    assert of_heads["cached"]["validation_loss"] == 8.5
    assert "megatron_fused" in capsys.readouterr().out


def test_steps_of_another_commit_are_not_taken_for_this_ones(started, tmp_path, monkeypatch):
    """A run that had ended is not repeated: its times would be reported under this commit."""
    monkeypatch.chdir(Path(__file__).parent.parent)
    monkeypatch.setattr(heads, "about", lambda device: ABOUT)
    assert heads.main(arguments(tmp_path / "x")) == 0
    commands = len(started)
    old = {**ABOUT, "commit": "another"}
    write_json(tmp_path / "x" / "in_forward" / RUN, {**old, "config": {}})
    with pytest.raises(RunError, match=r"in_forward holds .*: commit is 'another' there.*--out"):
        heads.main(arguments(tmp_path / "x"))
    assert len(started) == commands


def test_a_run_that_fails_ends_it(started, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    monkeypatch.setattr(subprocess, "run", lambda command: SimpleNamespace(returncode=3))
    assert heads.main(arguments(tmp_path / "x")) == 3
    assert not (tmp_path / "x.json").exists()


def test_options_of_ours_that_decide_no_numbers_are_left_out_of_megatrons(
    started, tmp_path, monkeypatch
):
    monkeypatch.chdir(Path(__file__).parent.parent)
    mine = ["--head.max-logits-bytes", "4096", "--head.impl", "eager"]
    assert heads.main([*arguments(tmp_path / "x"), *mine]) == 0
    found = [load_config(command[3:]).head for command in started]
    assert [head.max_logits_bytes for head in found] == [4096, 4096, None, None]
    assert [head.impl for head in found] == ["eager", "eager", None, None]


@pytest.mark.parametrize("argument", ["--out-dir=x", "--head.kind", "--head.schedule", "--out_dir"])
def test_what_each_run_has_of_its_own_is_refused(started, tmp_path, argument):
    option = argument.partition("=")[0].replace("_", "-")
    with pytest.raises(RunError, match=f"{option} is set for each head, so it must be left out"):
        heads.main([*arguments(tmp_path / "x"), argument, "auto"])
    assert started == []


def test_steps_that_only_warm_up_are_refused(started, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    with pytest.raises(RunError, match="--steps must be more than the 20 that warm up"):
        heads.main(arguments(tmp_path / "x", steps=heads.WARM_UP))
    assert not started
