"""The configuration of a training run: shipped files, combinations, resuming, learning rate."""

from pathlib import Path

import pytest

pytest.importorskip("tyro")

from flce_dist.launch.train.config import (
    MAY_CHANGE_ON_RESUME,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    flatten,
    load_config,
    resume_conflicts,
)
from flce_dist.launch.train.optimizer import learning_rate
from flce_dist.launch.yaml_config import ConfigError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path):
    config = load_config(["--config", str(path)], world_size=2)
    assert config.parallel.tensor == 2
    assert config.parallel.sequence_parallel


THEIRS = ["--head.kind", "megatron_fused"]
SMOOTH_CAP = ["--head.softcap", "30", "--head.label-smoothing", "0.1"]


@pytest.mark.parametrize(
    "overrides, world_size, message",
    [
        (["--model.num-heads", "6"], 2, r"model\.hidden_size must be divisible by .* = 6"),
        ([], 3, r"number of ranks that torchrun starts must be divisible by parallel\.tensor = 2"),
        (["--parallel.tensor", "8"], 8, r"model\.num_heads must be divisible by parallel\.tensor"),
        ([*THEIRS, "--head.z-loss-weight", "1e-4"], 2, r"head\.z_loss_weight is an .* 0\.0001"),
        (["--model.ffn-hidden-size", "33"], 2, r"model\.ffn_hidden_size must be divisible by"),
        (["--model.seq-length", "33"], 2, r"seq_length must be divisible by .* = 2, got 33"),
        (["--model.num-heads", "128"], 2, r"even for rotary embeddings, got 1"),
        (["--optimizer.min-lr", "1"], 2, r"min_lr must be at most optimizer\.lr = 0\.003, got 1"),
        (["--optimizer.warmup-steps", "101"], 2, r"at most optimizer\.decay_steps = 100, got 101"),
        (["--optimizer.weight-decay", "500"], 2, r"weight_decay must be below 1 / .*, got 500"),
        (["--head.schedule", "cached", *SMOOTH_CAP], 2, r"^head\.schedule='cached' .*='recompute'"),
        (["--head.filter-eps", "0", "--head.schedule", "cached"], 2, r"^head\.filter_eps needs"),
        (["--head.filter-eps", "0.1", "--head.softcap", "30"], 2, "^head.filtered.* needs softcap"),
        ([*THEIRS, "--head.vocab-order"], 2, r"head\.vocab_order is an option of .*, got True"),
        (["--data.text", "nowhere.txt"], 2, r"data\.text must be a file, got nowhere\.txt"),
        (["--data.text", "x" * 300], 2, r"data\.text must be a file, got xxx"),
        (["--config", "nowhere.yaml"], 2, r"--config must .* got nowhere\.yaml: No such file or"),
        (["--config", "."], 2, r"--config must name a file that can be read, got \.: Is a direc"),
        (["--config"], 2, "--config must be followed by a YAML file"),
    ],
)
def test_impossible_combinations(overrides, world_size, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides, world_size=world_size)


def test_without_sequence_parallelism_the_sequence_needs_no_division():
    overrides = ["--parallel.no-sequence-parallel", "--model.seq-length", "33"]
    assert load_config(overrides, world_size=2).model.seq_length == 33


def test_what_a_resume_may_change():
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


def test_learning_rate_rises_falls_and_stays():
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=12)
    assert [learning_rate(step, config) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert learning_rate(8, config) == pytest.approx(0.55)
    assert learning_rate(12, config) == learning_rate(99, config) == pytest.approx(0.1)
    flat = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=0, decay_steps=1)
    assert learning_rate(1, flat) == pytest.approx(0.1)
