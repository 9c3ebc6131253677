"""What the benchmark measures with: samples of time and memory, its data and the truth of them."""

import contextlib
import itertools
import math
import random
import time
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist.kernels.rows.formulas import RESCUE_ABOVE
from flce_dist.launch import call_time
from flce_dist.launch.bench import loss_functions, measure, problem
from flce_dist.launch.bench.config import BenchConfig, RunSpec, ShapeSpec
from flce_dist.launch.bench.divergences import KINDS, true_divergence
from flce_dist.launch.bench.measure import Measured
from flce_dist.launch.bench.peers import canonical
from flce_dist.launch.bench.problem import Errors, make_problem, make_truth
from flce_dist.launch.bench.report import make_records
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.reference import reference_linear_cross_entropy, reference_linear_divergence
from flce_dist.testing import relative_rms, run_ranks
from tests.bench_run import EAGER, GRID, peer, records, run


def test_a_sample_is_divided_by_its_calls_and_gradients_are_fresh(tmp_path, monkeypatch):
    calls: list[None] = []

    def takes_5_ms(hidden, weight, labels):
        assert hidden.grad is None and weight.grad is None
        calls.append(None)
        return canonical(hidden, weight, labels)

    looks = itertools.count()  # at the clock; each takes time, too, as floors must take some
    clock = SimpleNamespace(perf_counter=lambda: 5e-3 * len(calls) + 1e-4 * next(looks))
    monkeypatch.setattr(call_time, "time", clock)
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
        measured.sample()
        return measured.samples_ms, measured.failure, measured.peak_bytes

    slow = run_ranks(lambda group: measure(group, "slow"), 2, backend="gloo")
    assert slow[0] == slow[1]
    assert slow[0][0][0] >= 20 and slow[0][2] >= 1 << 20
    failed = run_ranks(lambda group: measure(group, "fails"), 2, backend="gloo")
    assert [found[:2] for found in failed] == [([], "rank 1: RuntimeError: broken")] * 2


def test_the_errors_of_the_worst_rank_count(monkeypatch):
    """NaN is larger than any, None is none."""

    def measured(group: dist.ProcessGroup) -> tuple[Any, ...]:
        found = Measured(RunSpec("eager"), make_problem(shape, cpu, 0, group), BenchConfig())
        of_rank = [Errors(1e-3, 0.2, None), Errors(2e-3, math.nan, None), Errors(1e-9, 0.1, None)]
        monkeypatch.setattr(found, "_first_calls", lambda truth: None)
        monkeypatch.setattr(found, "_slowest_ms", lambda calls: 1.0)
        found.errors, found.peak_bytes = of_rank[group.rank()], 7
        found.prepare(None)
        return astuple(found.errors)

    shape, cpu = ShapeSpec(T=8, H=4, V=18, dtype="fp32"), torch.device("cpu")
    for loss, dhidden, dweight in run_ranks(measured, 3, backend="gloo"):
        assert loss == 2e-3 and math.isnan(dhidden) and dweight is None


def test_the_time_of_a_floor_is_one_number():
    """Its p50, and what runs are measured against, whose last bits differ by other formulas."""
    problem = make_problem(ShapeSpec(T=8, H=4, V=16, dtype="fp32"), torch.device("cpu"), 0, None)
    draw = random.Random(0)
    for _ in range(2000):
        samples = [draw.uniform(0.01, 3.0) for _ in range(2)]
        floor = Measured(RunSpec("gemm3"), problem, BenchConfig(), samples_ms=samples)
        ours = Measured(RunSpec("eager"), problem, BenchConfig(), samples_ms=samples)
        of_floor, of_ours = make_records(ShapeSpec(), [floor, ours])
        assert of_ours.floor_ms == of_floor.p50_ms and of_ours.ratio == 1.0


@pytest.mark.parametrize("options", [{"max_counted": True}, {"skip_ignored": True}, {}], ids=str)
def test_a_run_is_called_with_its_options(monkeypatch, options):
    """Without them results are the same, and times another run's."""
    shape = ShapeSpec(T=20, H=4, V=16, dtype="fp32", counted=0.5)
    problem = make_problem(shape, torch.device("cpu"), 0, None)
    given: dict[str, Any] = {}
    monkeypatch.setattr(loss_functions, "linear_cross_entropy", lambda **x: given.update(x))
    call: Any = loss_functions.load_run(RunSpec("eager", "cached", 64, **options), problem)
    call()
    n = int((problem.labels != -100).sum())
    assert 0 < n < 20
    assert given.pop("max_counted", None) == (n if "max_counted" in options else None)
    assert given.pop("skip_ignored") == ("skip_ignored" in options)
    assert (given["schedule"], given["max_logits_bytes"], given["impl"]) == ("cached", 64, "eager")


@pytest.mark.parametrize("over", ["vocabulary", "ids"])
def test_scores_are_over_what_their_run_says(monkeypatch, over):
    problem = make_problem(ShapeSpec(T=6, H=4, V=16, dtype="fp32"), torch.device("cpu"), 0, None)
    found: list[Any] = []

    def scores(hidden, weight, ids, **options):
        found.append((options["over"], ids.shape, torch.equal(ids[:, 0], problem.labels)))
        return SimpleNamespace(logprob=torch.zeros(ids.shape))

    monkeypatch.setattr(loss_functions, "linear_logprob", scores)
    call = loss_functions.load_run(RunSpec("eager", over=over, ids=3), problem)
    call(problem.hidden, problem.weight, problem.labels)
    assert found == [(over, (6, 3), True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_true_divergence_is_that_of_all_tokens_however_they_are_cut(kind):
    problem = make_problem(ShapeSpec(T=23, H=8, V=30, dtype="fp32"), torch.device("cpu"), 0, None)
    operands = problem.hidden, problem.weight, *problem.teacher
    leaves = [x.double().requires_grad_() for x in operands[:2]]
    theirs = [x.double() for x in operands[2:]]
    expected, *_ = reference_linear_divergence(*leaves, *theirs, kind=kind)
    gradients = torch.autograd.grad(expected, leaves)
    for chunk in (5, 23, 40):
        loss, *found = true_divergence(operands, kind, chunk=chunk, gradients=True)
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        for mine, exact in zip(found, gradients, strict=True):
            assert mine is not None and relative_rms(mine, exact) < 1e-12


def problem_and_truth(shape: ShapeSpec, P: int) -> list[dict[str, Any]]:
    """Tensors of each rank, by name."""

    def rank(group: dist.ProcessGroup) -> dict[str, Any]:
        problem = make_problem(shape, torch.device("cpu"), 3, group if P > 1 else None)
        tensors = {name: getattr(problem, name) for name in ("hidden", "weight", "labels")}
        tensors["teacher_weight"] = problem.teacher[1]
        return {**vars(make_truth(problem, gradients=True)), **tensors}

    return run_ranks(rank, P, backend="gloo")


def test_a_run_may_be_told_how_many_tokens_count(tmp_path):
    runs = "  - {impl: eager, max_counted: true}\n" + EAGER
    grid = GRID.replace("dtype: fp32}", "dtype: fp32, counted: 0.5}")
    assert run(tmp_path, runs, "--check", "gradients", grid=grid) == 0
    found = records(tmp_path, "eager")
    assert {record.status for record in found} == {"ok"}
    assert {record.max_counted for record in found} == {True, False}
    assert all(record.counted == 0.5 and record.dhidden_error < 1e-5 for record in found)


@pytest.mark.parametrize("P", [1, 2])
def test_flagged_tokens_are_rescued_and_no_others(P):
    shape = ShapeSpec(T=20, H=64, V=60, dtype="bf16", flagged=3)
    assert shape.name.endswith("bf16 flagged=3")
    ranks = problem_and_truth(shape, P)
    weight = torch.cat([x["weight"] for x in ranks]).double()
    for x in ranks:
        z = x["hidden"].double() @ weight.T
        above = z.amax(1) - z.gather(1, x["labels"][:, None])[:, 0]
        assert (above > RESCUE_ABOVE).nonzero()[:, 0].tolist() == [0, 6, 13]


@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize(("counted", "contiguous"), [(1.0, False), (0.5, False), (0.25, True)])
def test_the_truth_is_the_textbook_in_fp64(counted, contiguous, P, monkeypatch):
    monkeypatch.setattr(problem, "CHUNK_BYTES", 8 * 30 * 7)  # chunks of 7 or 14 tokens
    shape = ShapeSpec(T=24, H=8, V=60, dtype="fp32", counted=counted, contiguous=contiguous)
    ranks = problem_and_truth(shape, P)
    ignored = ranks[0]["labels"] == -100
    assert 0 < ignored.sum() < 24 or counted == 1.0
    assert not contiguous or ignored.nonzero()[:, 0].tolist() == list(range(18))
    hidden = ranks[0]["hidden"].double().requires_grad_()
    weight = torch.cat([x["weight"] for x in ranks]).double().requires_grad_()
    (loss, *_) = reference_linear_cross_entropy(hidden, weight, ranks[0]["labels"])
    gradients = torch.autograd.grad(loss, (hidden, weight))
    dweight = torch.cat([x["dweight"] for x in ranks])
    for shards in ([x["weight"] for x in ranks], [x["teacher_weight"] for x in ranks]):
        assert len({tuple(shard.flatten().tolist()) for shard in shards}) == P
    for x in ranks:
        assert torch.equal(x["hidden"], ranks[0]["hidden"])
        assert x["loss"] == pytest.approx(loss.item(), rel=1e-13)
        assert relative_rms(x["dhidden"], gradients[0]) < 1e-13
    assert relative_rms(dweight, gradients[1]) < 1e-13
