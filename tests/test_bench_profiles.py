"""The benchmark's profiles: kernels by run, in a file beside the results."""

import contextlib
import errno
import gzip
import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

from flce_dist.launch.bench import profiles as profiles_module
from flce_dist.launch.bench.files import read_profiles
from flce_dist.launch.bench.profiles import Activity, Profile, describe, profile_of, take_profile
from tests import bench_run

NCCL = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BETWEEN = "Memcpy PtoP (Device -> Device)"
OWN_PART = "Memcpy DtoD (Device -> Device)"
PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
OURS = "_linear_stats_kernel"
KINDS = {
    NCCL: "communication", BETWEEN: "communication", PRODUCT: "products", OURS: "products",
    "fill": "other", OWN_PART: "other", "Memset (Device)": "other",
}  # fmt: skip
RECOMPUTE = "  - {impl: eager, schedule: recompute}\n"


def run(tmp_path: Path, *args: str) -> list[Any]:
    assert bench_run.run(tmp_path, RECOMPUTE, *args) == 0
    file = tmp_path / "out" / "found.v1.profile.json"
    return json.loads(file.read_text())["profiles"] if file.exists() else []


def test_each_run_of_each_shape_has_its_kernels_and_its_trace(tmp_path):
    assert run(tmp_path) == [], "without the option there is no file"
    profiles = run(tmp_path, "--trace", "--fresh")
    assert [(p["shape"]["T"], p["run"]) for p in profiles] == [
        (24, "gemm4"), (24, "eager recompute"), (12, "gemm4"), (12, "eager recompute"),
    ]  # fmt: skip
    for profile in profiles:
        times = [kernel["time_us"] for kernel in profile["kernels"]]
        assert times == sorted(times, reverse=True) and times[0] > 0
    products = {kernel["name"]: kernel for kernel in profiles[0]["kernels"]}["aten::mm"]
    assert products["launches"] == 4  # the logits twice and both gradients
    assert profiles[0]["step_us"] is None, "a CPU has no time line of its own"

    files = sorted(tmp_path.glob("out/*.trace.json.gz"))
    assert [path.name for path in files] == sorted(
        f"found.v1.T{T}-H16-V64-fp32.{run}.trace.json.gz"
        for T in (12, 24)
        for run in ("gemm4", "eager-recompute")
    )
    trace = json.loads(gzip.decompress(files[0].read_bytes()))
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}

    for path in files:
        path.unlink()
    again = run(tmp_path, "--profile", "--fresh")
    records = json.loads((tmp_path / "out" / "found.v1.json").read_text())["records"]
    launches = [sum(kernel["launches"] for kernel in profile["kernels"]) for profile in again]
    assert [x["launches"] for x in records] == launches
    assert len(again) == 4 and again != profiles, "a shape replaces its own profiles"
    assert run(tmp_path, "--profile") == again, "shapes profiled before are not measured again"
    assert not list(tmp_path.glob("out/*.gz")), "a profile comes without a trace"


def test_shapes_that_were_measured_without_a_profile_or_trace_get_one(tmp_path, capsys):
    """So do those after whose results a benchmark was killed. Records stay one for each run."""
    assert run(tmp_path) == []
    assert len(run(tmp_path, "--profile")) == 4
    assert "measured before" not in capsys.readouterr().out
    profiles = tmp_path / "out" / "found.v1.profile.json"
    content = json.loads(profiles.read_text())
    content["profiles"] = [x for x in content["profiles"] if x["shape"]["T"] == 12]
    profiles.write_text(json.dumps(content))
    assert len(run(tmp_path, "--profile")) == 4
    said = capsys.readouterr().out
    assert "T=12 H=16 V=64 fp32: measured before" in said
    assert "T=24 H=16 V=64 fp32: measured before" not in said
    run(tmp_path, "--trace")
    assert "measured before" not in capsys.readouterr().out
    assert len(list(tmp_path.glob("out/*.trace.json.gz"))) == 4
    run(tmp_path, "--trace")
    assert capsys.readouterr().out.count("measured before") == 2
    names = [(r.T, r.run.name) for r in bench_run.records(tmp_path)]
    assert names == [(T, run) for T in (24, 12) for run in ("gemm4", "eager recompute")]


def test_shapes_of_one_size_have_profiles_of_their_own(tmp_path):
    grid = bench_run.GRID.replace("T: 12, H: 16, V: 64", "T: 24, H: 16, V: 64, counted: 0.5")
    assert bench_run.run(tmp_path, RECOMPUTE, "--profile", grid=grid) == 0
    _, found = read_profiles(tmp_path / "out" / "found.v1.profile.json")
    titles = "T=24, H=16, V=64, fp32", "T=24, H=16, V=64, fp32, counted=0.5"
    runs = "gemm4", "eager recompute"
    assert [(x.shape, x.run) for x in found] == [(title, run) for title in titles for run in runs]


def test_a_run_that_cannot_be_profiled_has_failed(tmp_path, monkeypatch, capsys):
    """It keeps its times; a trace that cannot be written leaves none in part."""
    original = profiles_module.shutil.copyfileobj

    def full(source: Any, to: Any) -> None:
        if "eager" in str(to.name):
            to.write(b"part")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(source, to)

    monkeypatch.setattr(profiles_module.shutil, "copyfileobj", full)
    assert bench_run.run(tmp_path, RECOMPUTE, "--trace") == 1
    for record in bench_run.records(tmp_path):
        assert record.p50_ms > 0
        assert (record.status, record.launches is None) == (
            ("ok", False) if record.op == "floor" else ("error", True)
        )
        reason = "not profiled: RunError: cannot write .*eager.*: No space left on device"
        assert record.op == "floor" or re.match(reason, record.message)
    assert "not profiled" in capsys.readouterr().out
    names = {path.name.split(".")[3] for path in (tmp_path / "out").glob("*fp32*")}
    assert names == {"gemm4"}


def one_step(start: float) -> list[Activity]:
    """A gather that all wait for, two products with a reduce-scatter beside them, and its tail."""
    times = [
        (NCCL.replace("ReduceScatter_Sum", "AllGather"), 0, 10),
        (OURS, 10, 40),
        ("vectorized_elementwise_kernel", 38, 46),  # 2 of its 8 beside the product
        (PRODUCT, 50, 80),
        (NCCL, 60, 95),  # 20 of its 35 beside the product
        (BETWEEN, 95, 97),
        (OWN_PART, 97, 98),
    ]
    return [Activity(name, start + begin, start + end) for name, begin, end in times]


def test_each_moment_of_a_step_counts_once():
    """Found by counting; a copy aside is neither work nor communication."""
    draw = random.Random(0)
    for _ in range(200):
        found = []
        for _ in range(draw.randrange(1, 12)):
            start = draw.randrange(40)
            end, stream = start + draw.randrange(1, 9), draw.randrange(3)
            found.append(Activity(draw.choice(list(KINDS)), start, end, stream))
        moments: dict[str, set[int]] = {"products": set(), "other": set(), "communication": set()}
        computing = {x.stream for x in found if x.name in (PRODUCT, OURS, "fill")}
        for x in found:
            if x.name != OWN_PART or x.stream in computing:
                moments[KINDS[x.name]] |= set(range(int(x.start_us), int(x.end_us)))
        products, other, communication = moments.values()
        profile = profile_of(found, calls=1)
        step = max(x.end_us for x in found) - min(x.start_us for x in found)
        assert profile.step_us == step and profile.products_us == len(products)
        assert profile.other_us == len(other - products)
        assert profile.comm_us == len(communication)
        assert profile.exposed_comm_us == len(communication - products - other)
        assert profile.idle_us == step - len(products | other | communication)
        assert profile.idle_share == profile.idle_us / step
        counted = [(x.name, x.end_us - x.start_us) for x in found]
        assert {k.name: k.launches for k in profile.kernels} == Counter(name for name, _ in counted)
        times = [kernel.time_us for kernel in profile.kernels]
        assert sum(times) == sum(us for _, us in counted) and times == sorted(times, reverse=True)


def test_a_profile_is_of_one_call_on_average_and_its_timeline_of_the_middle_one():
    assert describe(profile_of(one_step(1000.0), 1)) == (
        "0.098 ms: products 0.060, other kernels 0.007, exposed communication 0.027 (27.6%) of "
        "0.047, idle 4.1%"
    )
    steps = [one_step(start) for start in (0.0, 100.0, 205.0)]  # 2 and 7 of idling between them
    steps[1][1] = Activity(OURS, 111.0, 140.0)
    shuffled = random.Random(0).sample(steps[0] + steps[1] + steps[2], 21)
    profile = profile_of(shuffled, calls=3)
    assert profile.step_us == pytest.approx((205 + 98) / 3)
    assert profile.exposed_comm_us == 27 and profile.products_us == pytest.approx(60 - 1 / 3)
    assert profile.idle_us == pytest.approx(4 + (2 + 7 + 1) / 3)
    assert {kernel.launches for kernel in profile.kernels} == {1}
    assert profile.timeline[:2] == (("communication", 0, 10), ("products", 11, 40))
    assert len(profile.timeline) == 7 and profile.timeline[-1] == ("other", 97, 98)
    assert profile_of(steps[0], 2).timeline == (), "seven launches are not those of two calls"
    assert profile_of([], 2) == Profile(())


def test_on_a_gpu_the_first_call_does_not_count(monkeypatch):
    """It waits for the ranks whose profilers start later."""
    first = [Activity(NCCL, 0.0, 5000.0), *one_step(4900.0)[1:]]
    found = first + one_step(5000.0) + one_step(5100.0)
    # Aside, so that the profile tells whether streams are known.
    found = [replace(x, stream=int(x.name == OWN_PART)) for x in found]

    def event(x: Activity, annotation: bool = False, device: DeviceType = DeviceType.CUDA) -> Any:
        return SimpleNamespace(
            name=x.name, is_user_annotation=annotation, device_type=device,
            time_range=Interval(x.start_us, x.end_us), device_resource_id=x.stream,
        )  # fmt: skip

    def events() -> list[Any]:
        whole = Activity("ProfilerStep", 0.0, 9000.0)
        others = [event(whole, annotation=True), event(whole, device=DeviceType.CPU)]
        return [*others, event(replace(whole, name="nccl:x")), *map(event, found)]

    recorded = contextlib.nullcontext(SimpleNamespace(events=events))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: recorded)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    call = mock.Mock()
    profile = take_profile(call, 2, torch.device("cuda"))
    assert call.call_count == 3
    assert profile == profile_of(found[7:], 2)
    assert profile.comm_us == 47 and profile.step_us == 99
    found.pop()
    assert take_profile(lambda: None, 2, torch.device("cuda")) == profile_of(found, 3)


@pytest.mark.gpu
def test_a_gpu_tells_products_copies_aside_and_the_rest():
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(1 << 26, device="cuda")
    here, aside = torch.empty_like(b), torch.empty_like(b)
    stream = torch.cuda.Stream()

    def call() -> None:
        (a @ a).exp_()
        here.copy_(b)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            aside.copy_(b)
        torch.cuda.current_stream().wait_stream(stream)
        here.zero_()

    call()
    profile = take_profile(call, 3, a.device)
    launches = {kernel.name: kernel.launches for kernel in profile.kernels}
    assert launches[OWN_PART] == 2, "copies are read at all"
    assert [kind for kind, *_ in profile.timeline] == ["products", "other", "other", "other"]
    starts = [start for _, start, _ in profile.timeline]
    assert starts == sorted(starts) and starts[0] == 0
    assert profile.comm_us == 0 == profile.exposed_comm_us
    assert profile.products_us and profile.other_us and profile.step_us and profile.idle_us
    parts = profile.products_us + profile.other_us + profile.idle_us
    assert parts == pytest.approx(profile.step_us)
    copy_us = next(kernel.time_us for kernel in profile.kernels if kernel.name == OWN_PART) / 2
    assert profile.idle_us > copy_us / 2  # more where other processes share the GPU
