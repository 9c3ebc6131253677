"""The benchmark's profiles: kernels by run, in a file beside the results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flce_dist.launch import bench
from flce_dist.launch.bench_profile import take_profile

GRID = """
device: cpu
check: none
warmup: 1
rounds: 1
sample_ms: 0.5
settle_ms: 0.0
shapes:
  - {T: 12, H: 16, V: 64, dtype: fp32}
  - {T: 24, H: 16, V: 64, dtype: fp32}
runs:
  - {impl: eager, schedule: recompute}
"""


def run(tmp_path: Path, *args: str) -> list[Any]:
    (tmp_path / "grid.yaml").write_text(GRID)
    paths = ["--config", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "found")]
    assert bench.main([*paths, *args]) == 0
    file = tmp_path / "found.profile.json"
    return json.loads(file.read_text())["profiles"] if file.exists() else []


def test_each_run_of_each_shape_has_its_kernels(tmp_path):
    profiles = run(tmp_path, "--profile")
    assert [(p["shape"]["T"], p["run"]) for p in profiles] == [
        (12, "gemm4"), (12, "eager recompute"), (24, "gemm4"), (24, "eager recompute"),
    ]  # fmt: skip
    for profile in profiles:
        times = [kernel["time_us"] for kernel in profile["kernels"]]
        assert times == sorted(times, reverse=True) and times[0] > 0
    products = {kernel["name"]: kernel for kernel in profiles[0]["kernels"]}["aten::mm"]
    assert products["launches"] == 4  # the logits twice and both gradients


def test_without_the_option_there_is_no_file(tmp_path):
    assert run(tmp_path) == []


def test_measured_again_a_shape_replaces_its_own_profiles(tmp_path):
    before = run(tmp_path, "--profile")
    after = run(tmp_path, "--profile", "--fresh")
    assert len(after) == len(before)
    assert run(tmp_path, "--profile") == after, "shapes measured before are not profiled again"


def test_launches_and_times_are_those_of_one_call():
    def call() -> None:
        for _ in range(3):
            torch.ones(4).cumsum(0)

    profile = take_profile(call, 5, torch.device("cpu"))
    launches = {kernel.name: kernel.launches for kernel in profile.kernels}
    assert launches["aten::cumsum"] == pytest.approx(3)
    assert profile.idle_share is None
