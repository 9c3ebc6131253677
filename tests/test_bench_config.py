"""The benchmark's configuration: grids, the floors they need, errors that name the key."""

import json
from pathlib import Path

import pytest

from flce_dist.launch.bench.config import (
    BenchConfig,
    RunSpec,
    ShapeSpec,
    as_json,
    check_config,
    floor_of,
    load_config,
    runs_of,
)
from flce_dist.launch.yaml_config import ConfigError

ROOT = Path(__file__).parents[1]
GRIDS = sorted((ROOT / "configs" / "bench").glob("*.yaml"))
OVER_RANKS = "tensor_parallel"


@pytest.mark.parametrize(
    ("path", "world_size"),
    [(path, P) for path in GRIDS for P in ((1, 2, 4, 8) if path.stem == OVER_RANKS else (1,))],
    ids=lambda x: getattr(x, "stem", None),
)
def test_grids_are_valid(path, world_size):
    """That for several ranks on any number, with whole hidden states in floors alone."""
    config = load_config(["--config", str(path)], world_size=world_size)
    assert config.out.name == path.stem
    for shape in config.shapes:
        runs = runs_of(config, shape)
        assert {floor_of(run) for run in runs} <= {run.name for run in runs} | {
            "gemm1",
            "gemm2",
            "gemm3",
        }
        if path.stem == OVER_RANKS:
            whole = {run.impl for run in runs if not run.sequence_parallel}
            assert whole == {"gemm1", "gemm3", "gemm4"}
            assert {"megatron_fused", "megatron_unfused"} <= {run.impl for run in runs}


def test_yaml_lists_become_shapes_and_runs_and_flags_override_them(tmp_path):
    text = """
    rounds: 3
    sample_ms: 5
    settle_ms: 7
    shapes:
      - {T: 8, H: 4, V: 16, dtype: fp32}
      - {T: 9, H: 4, V: 16, runs: [{impl: eager, mode: forward}]}
    runs:
      - {impl: eager, schedule: cached, max_logits_bytes: 4096}
    """
    overrides = ["--rounds", "7", "--shapes.0.T", "5", "--runs.0.schedule", "auto", "--fresh"]
    (tmp_path / "grid.yaml").write_text(text)
    path = str(tmp_path / "grid.yaml")
    config = load_config(["--config", path, *overrides, "--cuda-graph"], world_size=1)
    assert config.rounds == 7 and config.sample_ms == 5.0 and config.fresh
    assert config.settle_ms == 7.0 and config.cuda_graph
    assert config.shapes[0] == ShapeSpec(5, 4, 16, "fp32")
    assert config.shapes[1].runs == (RunSpec("eager", mode="forward"),)
    assert config.runs == (RunSpec("eager", "auto", 4096),)
    assert config.shapes[1].dtype == "bf16"


def test_the_floors_that_ratios_need_are_added_and_come_first():
    runs = (RunSpec("eager", "recompute"), RunSpec("canonical", mode="forward"))
    config = BenchConfig(shapes=(ShapeSpec(),), runs=(*runs, RunSpec("read_weight")))
    found = runs_of(config, config.shapes[0])
    assert [run.impl for run in found[:3]] == ["gemm1", "read_weight", "gemm4"]
    assert found[:2] == [RunSpec("gemm1", mode="forward"), RunSpec("read_weight", mode="forward")]
    assert tuple(found[3:]) == runs


def test_how_samples_are_taken_belongs_to_what_results_mean_and_where_they_go_does_not():
    """A file that was begun with other numbers is not gone on with."""
    assert as_json(BenchConfig()) == as_json(BenchConfig(out=Path("elsewhere"), fresh=True))
    configs = [BenchConfig(), BenchConfig(settle_ms=0.0), BenchConfig(cuda_graph=True)]
    assert len({json.dumps(as_json(config)) for config in configs}) == 3


TOLD = RunSpec("canonical", max_counted=True)
EACH, CACHED = RunSpec("canonical", per_token=True), RunSpec("liger", schedule="cached")
SCORES = RunSpec("eager", over="ids")
BEST = RunSpec("eager", best="rank")
TOLD_SCORES = RunSpec("eager", over="ids", max_counted=True)
OTHER, PEER = RunSpec("canonical", divergence="tv"), RunSpec("trl_divergence")
SHAPE, RUN, SP = (ShapeSpec(T=6, V=30),), (RunSpec("eager"),), (RunSpec(sequence_parallel=True),)


@pytest.mark.parametrize("config, world_size, message", [
    (BenchConfig(), 1, "must name at least one shape, got none"),
    (BenchConfig(shapes=SHAPE), 1, "runs must name at least one run for T=6 .*, got none"),
    (BenchConfig(shapes=SHAPE * 2, runs=RUN), 1, "each shape once, got twice: .'T=6 H=4096"),
    (BenchConfig(shapes=SHAPE, runs=RUN * 2), 1, "runs must differ, got 'eager auto' twice"),
    (BenchConfig(shapes=SHAPE, runs=(RunSpec("quick"),)), 1, "impl must be one of .*'quick'"),
    (BenchConfig(shapes=SHAPE, runs=(TOLD,)), 1, "max_counted is an option of triton and"),
    (BenchConfig(shapes=SHAPE, runs=(EACH,)), 1, "per_token is an option .* 'canonical per_token"),
    (BenchConfig(shapes=SHAPE, runs=(CACHED,)), 1, "schedule is an option of triton and eager, go"),
    (
        BenchConfig(shapes=SHAPE, runs=(SCORES,)),
        1,
        "the loss 'eager auto' beside 'eager auto o",
    ),
    (BenchConfig(shapes=SHAPE, runs=(*RUN, TOLD_SCORES)), 1, "over is an option of .* token"),
    (BenchConfig(shapes=SHAPE, runs=(BEST,)), 1, "best is of mode forward of .*, got 'eager auto"),
    (BenchConfig(shapes=SHAPE, runs=(OTHER,)), 1, "divergence names what triton, eager and"),
    (BenchConfig(shapes=SHAPE, runs=(PEER,)), 1, "divergence names what triton, eager and"),
    (BenchConfig(shapes=SHAPE, runs=RUN), 4, "V must be divisible by the 4 ranks, got 30"),
    (BenchConfig(shapes=(ShapeSpec(T=5, V=30),), runs=SP), 2, "T must be divisible by .* 5"),
    (BenchConfig(shapes=(ShapeSpec(T=-2),), runs=RUN), 1, r"shapes\[0\]\.T must be .*-2"),
    (BenchConfig(sample_ms=float("inf")), 1, "sample_ms must be a float that is .*, got inf"),
    (BenchConfig(warmup=True), 1, "warmup must be an int within .*, got True"),
])  # fmt: skip
def test_impossible_grids(config, world_size, message):
    with pytest.raises(ConfigError, match=message):
        check_config(config, world_size=world_size)
