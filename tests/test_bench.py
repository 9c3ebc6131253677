"""``launch.bench`` end to end on CPU: records, judgements, ranks; files in test_bench_files.py."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("tyro")

from flce_dist.launch.bench import __main__ as bench
from flce_dist.launch.bench import measure, problem
from flce_dist.launch.bench.config import BenchConfig, RunSpec, ShapeSpec
from flce_dist.launch.bench.files import read_results
from flce_dist.launch.bench.measure import Measured, over_ranks
from flce_dist.launch.bench.peers import PEERS, Peer, canonical
from flce_dist.launch.bench.problem import make_problem, make_truth
from flce_dist.launch.bench.report import FIELDS
from flce_dist.memory import peak_memory
from flce_dist.reference import reference_linear_cross_entropy
from flce_dist.testing import relative_rms, run_ranks
from tests.bench_run import EAGER, GRID, records, run

ROOT = Path(__file__).parent.parent
SCHEMA = """op impl schedule dtype T V H P mode max_logits_bytes p20_ms p50_ms p80_ms peak_mib
workspace_mib loss_error dhidden_error dweight_error floor_ms ratio status message""".split()


def peer(monkeypatch: pytest.MonkeyPatch, loss_of: Any, parallel: bool = False) -> None:
    """Put an adapter in the place of canonical."""
    monkeypatch.setitem(PEERS, "canonical", Peer(lambda group: loss_of, parallel=parallel))


def test_smoke_grid_runs_everywhere(tmp_path, capsys):
    config = ROOT / "configs" / "bench" / "smoke.yaml"
    out = ["--out", str(tmp_path / "out" / "found.v1"), "--device", "cpu"]
    assert bench.main(["--config", str(config), *out]) == 0
    about, _ = read_results(tmp_path / "out" / "found.v1.json")
    found = records(tmp_path)
    assert about["hardware"].startswith("CPU") and about["torch"] == torch.__version__
    assert about["config"]["rounds"] == 3 and about["ranks"] == 1
    assert set(SCHEMA) <= set(FIELDS)

    ours = [record for record in found if record.impl == "eager"]
    assert {record.schedule for record in ours} == {
        None, "recompute", "cached", "in_forward", "auto",
    }  # fmt: skip
    for record in found:
        assert record.status in ("ok", "error"), record
        if record.status == "error":
            assert record.impl in ("liger", "torch_linear_cross_entropy")
            assert record.message.startswith("NotInstalled") and record.p50_ms is None
            continue
        assert 0 < record.p20_ms <= record.p50_ms <= record.p80_ms
        if record.op == "floor":
            assert record.ratio is None and record.loss_error is None
            continue
        assert record.loss_error < 1e-6
        assert record.ratio == pytest.approx(record.p50_ms / record.floor_ms)
        assert (record.dhidden_error is None) == (record.mode == "forward")
        if record.mode == "forward_backward":
            assert 0 < record.dhidden_error < 1e-5 and 0 < record.dweight_error < 1e-5
            assert 0 < record.workspace_mib < record.peak_mib
    printed = capsys.readouterr().out
    assert "T=48 H=32 V=1000 fp32" in printed and "eager in_forward" in printed


def test_each_record_is_held_against_its_own_floor(tmp_path):
    runs = EAGER + "  - {impl: eager, schedule: recompute}\n  - {impl: eager, mode: forward}\n"
    assert run(tmp_path, runs) == 0
    found = [record for record in records(tmp_path) if record.T == 24]
    times = {record.impl: record.p50_ms for record in found if record.op == "floor"}
    floors = {(r.mode, r.schedule): r.floor_ms for r in found if r.op != "floor"}
    assert floors == {
        ("forward_backward", "cached"): times["gemm3"],
        ("forward_backward", "recompute"): times["gemm4"],
        ("forward", None): times["gemm1"],
    }


def test_reading_the_weight_is_the_floor_where_it_takes_longer(tmp_path, monkeypatch):
    slow = bench.runs_of.__globals__["FLOORS"]["read_weight"].__class__(
        lambda hidden, weight: lambda: time.sleep(0.01), "forward"
    )
    monkeypatch.setitem(bench.runs_of.__globals__["FLOORS"], "read_weight", slow)
    assert run(tmp_path, "  - {impl: read_weight}\n  - {impl: eager, mode: forward}\n") == 0
    assert all(record.floor_ms >= 10 for record in records(tmp_path, "eager"))


def scaled_loss(hidden, weight, labels):
    return canonical(hidden, weight, labels) * 1.01


def zero_gradients(hidden, weight, labels):
    return canonical(hidden.detach(), weight.detach(), labels) + 0 * (hidden.sum() + weight.sum())


def scaled_dweight(hidden, weight, labels):
    return canonical(hidden, weight + 0.05 * (weight - weight.detach()), labels)


def nan_loss(hidden, weight, labels):
    return canonical(hidden, weight, labels) * float("nan")


@pytest.mark.parametrize(
    "fault, name",
    [
        (scaled_loss, "loss"),
        (zero_gradients, "dhidden"),
        (scaled_dweight, "dweight"),
        (nan_loss, "loss"),
    ],
)
def test_a_wrong_peer_is_marked_and_keeps_its_times(tmp_path, monkeypatch, capsys, fault, name):
    peer(monkeypatch, fault)
    assert run(tmp_path, EAGER + "  - {impl: canonical}\n") == 0
    for record in records(tmp_path, "canonical"):
        assert record.status == "wrong" and record.message.startswith(f"{name} is off by")
        assert record.p50_ms > 0
    assert all(record.status == "ok" for record in records(tmp_path, "eager"))
    assert f"wrong: {name} is off by" in capsys.readouterr().out


def test_eager_sets_what_gradients_may_be_off_by(tmp_path, monkeypatch):
    def slightly_off(hidden, weight, labels):
        return canonical(hidden + 0.01 * (hidden - hidden.detach()), weight, labels)

    peer(monkeypatch, slightly_off)
    assert run(tmp_path, EAGER + "  - {impl: canonical}\n") == 0
    assert {record.status for record in records(tmp_path, "canonical")} == {"ok"}
    runs = EAGER + "  - {impl: canonical}\n  - {impl: torch_eager}\n"
    assert run(tmp_path, runs, "--fresh") == 0
    assert {record.status for record in records(tmp_path, "canonical")} == {"wrong"}
    assert {record.status for record in records(tmp_path, "torch_eager")} == {"ok"}


def test_a_loss_in_half_precision_may_be_rounded(tmp_path):
    runs = "  - {impl: torch_eager}\n"
    assert run(tmp_path, runs, "--shapes.0.dtype", "bf16", "--shapes.1.dtype", "bf16") == 0
    found = records(tmp_path, "torch_eager")
    assert {record.status for record in found} == {"ok"}
    assert max(record.loss_error for record in found) > 1e-4


def test_an_erring_peer_costs_its_own_row_only(tmp_path, monkeypatch, capsys):
    def raises(hidden, weight, labels):
        raise torch.OutOfMemoryError("no memory for [logits]\nwith a long explanation")

    peer(monkeypatch, raises)
    assert run(tmp_path, "  - {impl: canonical}\n" + EAGER) == 0
    for record in records(tmp_path, "canonical"):
        assert record.status == "error"
        assert record.message == "OutOfMemoryError: no memory for [logits]"
        assert record.p50_ms is None and record.loss_error is None
    assert all(record.status == "ok" and record.p50_ms for record in records(tmp_path, "eager"))
    assert "error: OutOfMemoryError: no memory for [logits]" in capsys.readouterr().out


def test_a_peer_that_fails_late_leaves_no_time(tmp_path, monkeypatch):
    calls: list[None] = []

    def fails_at_last(hidden, weight, labels):
        calls.append(None)
        if len(calls) > 6:
            raise RuntimeError("tired")
        return canonical(hidden, weight, labels)

    peer(monkeypatch, fails_at_last)
    assert run(tmp_path, EAGER + "  - {impl: canonical}\n") == 0
    found = records(tmp_path, "canonical")
    assert [(r.status, r.p50_ms, r.message) for r in found] == [
        ("error", None, "RuntimeError: tired")
    ] * 2


def test_a_sample_is_divided_by_its_calls_and_gradients_are_fresh(tmp_path, monkeypatch):
    calls: list[None] = []

    def takes_5_ms(hidden, weight, labels):
        assert hidden.grad is None and weight.grad is None
        calls.append(None)
        return canonical(hidden, weight, labels)

    looks = itertools.count()  # at the clock; each takes time, too, as floors must take some
    clock = SimpleNamespace(perf_counter=lambda: 5e-3 * len(calls) + 1e-4 * next(looks))
    monkeypatch.setattr(measure, "time", clock)
    peer(monkeypatch, takes_5_ms)
    one_shape = GRID.replace("  - {T: 12, H: 16, V: 64, dtype: fp32}\n", "")
    assert run(tmp_path, "  - {impl: canonical}\n", "--sample-ms", "20", grid=one_shape) == 0
    (record,) = records(tmp_path, "canonical")
    assert record.status == "ok" and record.p50_ms == pytest.approx(5, abs=0.1)
    assert len(calls) == 4 + 2 * (1 + 4)  # warm up, memory, two for choosing; then two samples


def test_workspace_is_what_goes_beyond_gradients(tmp_path, monkeypatch):
    def greedy(hidden, weight, labels):
        torch.empty(8 << 20, dtype=torch.uint8)
        return canonical(hidden, weight, labels)

    peer(monkeypatch, greedy)
    assert run(tmp_path, "  - {impl: canonical}\n  - {impl: torch_eager}\n") == 0
    found, plain = records(tmp_path, "canonical"), records(tmp_path, "torch_eager")
    for record, other in zip(found, plain, strict=True):
        gradients = 4 * record.H * (record.T + record.V) / 2**20
        assert record.peak_mib - record.workspace_mib == pytest.approx(gradients)
        assert 7.9 <= record.workspace_mib < 8.5 and other.workspace_mib < 0.5


def test_memory_shared_with_peers_counts_for_the_run_that_took_it(tmp_path, monkeypatch):
    held = [3 << 20]

    @contextlib.contextmanager
    def shared(device):
        with peak_memory(device) as peak:
            yield peak
        held[0] += 4 << 20
        peak.shared_bytes = held[0]

    monkeypatch.setattr(measure, "peak_memory", shared)
    monkeypatch.setattr(measure, "release_shared_memory", lambda: held.__setitem__(0, 0))
    assert run(tmp_path, EAGER + "  - {impl: torch_eager}\n") == 0
    for record in records(tmp_path, "eager") + records(tmp_path, "torch_eager"):
        assert 4 <= record.workspace_mib < 4.5


@pytest.mark.parametrize("P", [1, 2])
def test_the_truth_is_the_textbook_in_fp64(P, monkeypatch):
    monkeypatch.setattr(problem, "CHUNK_BYTES", 8 * 30 * 7)  # chunks of 7 or 14 tokens
    shape = ShapeSpec(T=24, H=8, V=60, dtype="fp32")

    def rank(group: dist.ProcessGroup) -> dict[str, Any]:
        problem = make_problem(shape, torch.device("cpu"), 3, group if P > 1 else None)
        truth = make_truth(problem, gradients=True)
        return {**vars(truth), "hidden": problem.hidden, "weight": problem.weight,
                "labels": problem.labels}  # fmt: skip

    ranks = run_ranks(rank, P, backend="gloo")
    hidden = ranks[0]["hidden"].double().requires_grad_()
    weight = torch.cat([x["weight"] for x in ranks]).double().requires_grad_()
    (loss, *_) = reference_linear_cross_entropy(hidden, weight, ranks[0]["labels"])
    gradients = torch.autograd.grad(loss, (hidden, weight))
    dweight = torch.cat([x["dweight"] for x in ranks])
    for x in ranks:
        assert torch.equal(x["hidden"], ranks[0]["hidden"])
        assert x["loss"] == pytest.approx(loss.item(), rel=1e-13)
        assert relative_rms(x["dhidden"], gradients[0]) < 1e-13
    assert relative_rms(dweight, gradients[1]) < 1e-13


def test_the_slowest_and_the_failing_rank_count(monkeypatch):
    shape, run_of = ShapeSpec(T=8, H=4, V=16, dtype="fp32"), RunSpec("canonical")

    def measure(group: dist.ProcessGroup, fault: str) -> tuple[list[float], str | None, Any]:
        def loss_of(hidden, weight, labels):
            if group.rank() == 1 and fault == "fails":
                raise RuntimeError("broken")
            if group.rank() == 1 and fault == "slow":
                time.sleep(0.02)
                torch.empty(1 << 20, dtype=torch.uint8)
            return (hidden * weight[: len(hidden)]).sum()

        peer(monkeypatch, loss_of, parallel=True)
        problem = make_problem(shape, torch.device("cpu"), 0, group)
        config = BenchConfig(warmup=1, sample_ms=1.0, settle_ms=0.0)
        measured = Measured(run_of, problem, config)
        measured.prepare(None)
        over_ranks(measured)
        measured.sample()
        return measured.samples_ms, measured.failure, measured.peak_bytes

    slow = run_ranks(lambda group: measure(group, "slow"), 2, backend="gloo")
    assert slow[0] == slow[1]
    assert slow[0][0][0] >= 20 and slow[0][2] >= 1 << 20
    failed = run_ranks(lambda group: measure(group, "fails"), 2, backend="gloo")
    assert [found[:2] for found in failed] == [([], "rank 1: RuntimeError: broken")] * 2


def test_two_ranks_end_to_end(tmp_path):
    runs = EAGER + (
        "  - {impl: eager, schedule: recompute, sequence_parallel: true}\n  - {impl: canonical}\n"
    )
    (tmp_path / "grid.yaml").write_text(GRID + runs)
    paths = ["--config", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out" / "found.v1")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", "-m", "flce_dist.launch.bench", *paths]
    command.append("--trace")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(b"T=24 H=16 V=64 fp32 on 2 ranks") == 1  # rank 0 alone prints
    assert json.loads((tmp_path / "out" / "found.v1.json").read_text())["about"]["ranks"] == 2
    profiles = json.loads((tmp_path / "out" / "found.v1.profile.json").read_text())["profiles"]
    assert {"eager cached", "eager recompute SP"} <= {profile["run"] for profile in profiles}
    assert len(list((tmp_path / "out").glob("*.trace.json.gz"))) == len(profiles)
    ours = records(tmp_path, "eager")
    assert [record.sequence_parallel for record in ours] == [False, True] * 2
    for record in ours:
        assert record.P == 2 and record.status == "ok" and record.ratio > 0
        assert record.loss_error < 1e-6 and record.dhidden_error < 1e-5 > record.dweight_error
    for record in records(tmp_path, "canonical"):
        assert record.message.endswith("canonical does not split the vocabulary over ranks")
