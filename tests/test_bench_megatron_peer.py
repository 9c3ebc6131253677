"""Megatron's output layer and loss as peers of the benchmark, over gloo and alone."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from flce_dist.launch.bench import megatron_peer
from flce_dist.launch.bench.config import BenchConfig, RunSpec, ShapeSpec
from flce_dist.launch.bench.files import read_results
from flce_dist.launch.bench.measure import Measured
from flce_dist.launch.bench.peers import PEERS
from flce_dist.launch.bench.problem import Problem, make_problem, make_truth
from flce_dist.launch.bench.report import make_records
from tests.bench_run import run
from tests.on_ranks import on_ranks
from tests.problems import pairwise

CONFIG = BenchConfig(warmup=1, sample_ms=0.1, settle_ms=0.0, check="gradients")
SHAPE = ShapeSpec(T=64, H=256, V=512, dtype="fp32")


def measured(problem: Problem, asked: RunSpec) -> Measured:
    found = Measured(asked, problem, CONFIG)
    # The fused loss compiles for half a minute on a CPU; uncompiled it computes the same.
    with torch.compiler.set_stance("force_eager"):
        found.prepare(make_truth(problem, gradients=asked.has_gradients))
        found.sample()
    return found


BUDGETS = {
    ("megatron_fused", "fp32"): 4e-3,  # it rounds the gradient of fp32 logits, too, to bf16
    ("megatron_unfused", "fp32"): 1e-6,
    ("megatron_unfused", "bf16"): 1e-2,
    ("eager", "fp32"): 1e-6,  # alone sequence parallelism is of all tokens
}
MODES = "forward", "forward_backward"
CASES = [
    *itertools.product([2], [x for x in BUDGETS if x[0] != "eager"], [False, True], MODES),
    (1, ("eager", "fp32"), True, "forward_backward"),
    (1, ("megatron_unfused", "fp32"), True, "forward_backward"),
]


@pytest.mark.parametrize(("P", "what", "sp", "mode"), pairwise(CASES))
@on_ranks("P")
def test_the_head_is_right(group, P, what, sp, mode):
    impl, dtype = what
    asked = RunSpec(impl, "cached", mode=mode, sequence_parallel=sp)
    shape = ShapeSpec(SHAPE.T, SHAPE.H, SHAPE.V, dtype)
    try:
        found = measured(make_problem(shape, torch.device("cpu"), 0, group), asked)
    finally:
        megatron_peer.stop()
    (record,) = make_records(shape, [found])
    assert record.status == "ok", record.message
    assert record.P == P and record.p50_ms and record.sequence_parallel == sp
    assert record.loss_error is not None
    assert record.loss_error < (1e-6 if dtype == "fp32" else 1e-2)
    for error in (record.dhidden_error, record.dweight_error):
        assert (error is None) == (mode == "forward")
        assert error is None or 0 < error < BUDGETS[what]


@pytest.mark.parametrize("impl", ["megatron_unfused", "eager"])
@on_ranks(2)
def test_gathered_hidden_states_count_as_memory(group, impl):
    """Also those that the peer keeps."""
    problem, found = make_problem(SHAPE, torch.device("cpu"), 0, group), []
    keeps = dataclasses.replace(PEERS["megatron_unfused"], drop_buffers=None)
    try:
        for peer in (PEERS["megatron_unfused"], keeps):
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(PEERS, "megatron_unfused", peer)
                one = measured(problem, RunSpec(impl, "recompute", sequence_parallel=True))
            assert one.failure is None and one.peak_bytes is not None
            found.append((one.peak_bytes, one.gradient_bytes))
    finally:
        megatron_peer.stop()
    gathered, dweight = 4 * SHAPE.T * SHAPE.H, 4 * SHAPE.H * SHAPE.V // 2
    (peak, gradients), (kept, _) = found
    assert gradients == gathered // 2 + dweight
    assert peak - gradients >= gathered
    assert impl == "eager" or peak - kept == pytest.approx(gathered, rel=0.05)


RUNS = """
  - {impl: eager, schedule: cached, sequence_parallel: true}
  - {impl: megatron_unfused, sequence_parallel: true}
"""


def test_alone_it_runs_without_torchrun_and_leaves_nothing(tmp_path, monkeypatch):
    from megatron.core import parallel_state

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    current_device = torch.cuda.current_device
    assert run(tmp_path, RUNS) == 0
    about, records = read_results(tmp_path / "out" / "found.v1.json")
    assert about["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert about["environment"]["NCCL_NVLS_ENABLE"] == "0" and "PATH" not in about["environment"]
    assert about["peers"]["megatron-core"]
    found = [record for record in records if record.op != "floor"]
    assert [(r.impl, r.status, r.P) for r in found] == [
        ("eager", "ok", 1), ("megatron_unfused", "ok", 1),
    ] * 2  # fmt: skip
    assert not dist.is_initialized() and not parallel_state.is_initialized()
    kept = [n for n, x in vars(parallel_state).items() if isinstance(x, dist.ProcessGroup)]
    assert kept == []  # a forked rank that overwrote one would wait for its threads
    assert torch.cuda.current_device is current_device
