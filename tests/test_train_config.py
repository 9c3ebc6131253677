"""Configuration errors name the key, the expectation and the value, before any process group."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tyro")

from flce_dist.launch import train
from flce_dist.launch.program import run_program
from flce_dist.launch.train_config import (
    MAY_CHANGE_ON_RESUME,
    ModelConfig,
    RunConfig,
    flatten,
    load_config,
    resume_conflicts,
)
from flce_dist.launch.train_data import load_corpus
from flce_dist.launch.yaml_config import ConfigError

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def from_yaml(tmp_path: Path, text: str, *overrides: str, world_size: int = 2) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(["--config", str(path), *overrides], world_size=world_size)


def test_quickstart_is_valid() -> None:
    config = load_config(["--config", str(QUICKSTART)], world_size=2)
    assert config.parallel.tensor == 2 and config.parallel.sequence_parallel


def test_yaml_gives_values_and_the_command_line_overrides_them(tmp_path: Path) -> None:
    text = "steps: 7\nmodel:\n  hidden_size: 64\n  num_heads: 2\noptimizer:\n  lr: 1\n"
    config = from_yaml(tmp_path, text, "--model.hidden-size", "96", "--head.softcap", "30")
    assert (config.steps, config.model.hidden_size, config.model.num_heads) == (7, 96, 2)
    assert config.head.softcap == 30.0
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    assert config.model.num_layers == RunConfig().model.num_layers


def test_every_value_can_be_overridden() -> None:
    values = {"model.dtype": "bfloat16", "head.schedule": "cached", "head.impl": "eager"}
    values |= {"device": "cpu", "out_dir": "elsewhere", "data.text": str(QUICKSTART)}
    defaults = flatten(RunConfig())
    for key, default in defaults.items():
        name = key.replace("_", "-")
        if isinstance(default, bool):
            section, dot, last = name.rpartition(".")
            args = [f"--{section}{dot}{'no-' if default else ''}{last}"]
        elif isinstance(default, int):
            args = [f"--{name}", str(2 * default)]
        else:
            args = [f"--{name}", values.get(key, "1" if key == "head.max_logits_bytes" else "0.5")]
        changed = flatten(load_config(args, world_size=4))
        assert {k for k in defaults if changed[k] != defaults[k]} == {key}


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "model:\n  hiden_size: 64",
            r"unknown key model\.hiden_size; did you mean model\.hidden_s",
        ),
        ("stepz: 1", r"unknown key stepz; did you mean steps\?"),
        ("zzz: 1", "unknown key zzz; known: out_dir, steps"),
        ("steps: many", r"steps must be int, got 'many'"),
        ("steps: true", r"steps must be int, got True"),
        ("optimizer:\n  lr: 1e-3", r"optimizer\.lr must be float, got '1e-3'; .*write 1\.0e-3"),
        ("head:\n  schedule: fast", r"head\.schedule must be one of auto, .*got 'fast'"),
        ("head:\n  impl: cuda", r"head\.impl must be one of triton, eager, got 'cuda'"),
        ("model: 3", r"model must hold keys and values, got 3"),
        ("steps: [", "is not YAML"),
    ],
)
def test_wrong_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(tmp_path, text)


@pytest.mark.parametrize(
    "overrides, world_size, message",
    [
        (
            ["--model.num-heads", "6"],
            2,
            r"model\.hidden_size must be divisible by model\.num_heads",
        ),
        ([], 3, r"number of ranks that torchrun starts must be divisible by parallel\.tensor = 2"),
        (["--parallel.tensor", "8"], 8, r"model\.num_heads must be divisible by parallel\.tensor"),
        (["--model.ffn-hidden-size", "33"], 2, r"model\.ffn_hidden_size must be divisible by"),
        (["--model.seq-length", "33"], 2, r"seq_length must be divisible by .* = 2, got 33"),
        (["--model.num-heads", "128"], 2, r"even for rotary embeddings, got 1"),
        (["--steps", "0"], 2, r"steps must be positive, got 0"),
        (["--head.max-logits-bytes", "-1"], 2, r"head\.max_logits_bytes must be positive, got -1"),
        (["--data.validation-fraction", "1.5"], 2, r"between 0 and 1, got 1\.5"),
        (["--data.text", "nowhere.txt"], 2, r"data\.text must be a file, got nowhere\.txt"),
        (["--config", "nowhere.yaml"], 2, r"--config must name a file, got nowhere\.yaml"),
        (["--config"], 2, "--config must be followed by a YAML file"),
    ],
)
def test_impossible_combinations(overrides: list[str], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides, world_size=world_size)


def test_without_sequence_parallelism_the_sequence_needs_no_division() -> None:
    overrides = ["--parallel.no-sequence-parallel", "--model.seq-length", "33"]
    assert load_config(overrides, world_size=2).model.seq_length == 33


def test_a_text_that_is_too_short_names_the_sequence_length(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    text = tmp_path / "short.txt"
    text.write_text("a few words only")
    config = RunConfig(model=ModelConfig(seq_length=8))
    with pytest.raises(ConfigError, match=r"seq_length must leave .* got 8"):
        load_corpus(replace(config, data=replace(config.data, text=text)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.hiden-size", "64"], "hiden-size"),
        (["--head.schedule", "fast"], "fast"),
        (["--model.num-heads", "6"], "error: model.hidden_size must be divisible"),
    ],
)
def test_one_rank_explains_what_is_wrong_and_exits_with_2(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_program(train.main)
    assert ended.value.code == 2
    assert message in "".join(capfd.readouterr())


def test_without_torchrun_the_program_says_how_to_start_it() -> None:
    env = {k: v for k, v in os.environ.items() if k != "RANK"}
    env |= {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    program = [sys.executable, "-m", "flce_dist.launch.train"]
    done = subprocess.run(program, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: ranks must be started by torchrun" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_resume_may_change() -> None:
    saved = flatten(RunConfig()) | {"world_size": 2}
    assert resume_conflicts(saved, saved) == []
    assert set(saved) > MAY_CHANGE_ON_RESUME
    longer = flatten(RunConfig(steps=9, out_dir=Path("elsewhere"))) | {"world_size": 2}
    assert resume_conflicts(saved, longer) == []
    wider = flatten(RunConfig(model=ModelConfig(hidden_size=256), seed=2)) | {"world_size": 4}
    assert resume_conflicts(saved, wider) == [
        "model.hidden_size is 128 there and 256 here",
        "seed is 1234 there and 2 here",
        "world_size is 2 there and 4 here",
    ]
