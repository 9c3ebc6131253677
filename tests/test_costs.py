"""GEMMs and bytes that ``plan`` tells: those that calls make, and that were measured on GPUs."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from flce_dist import CallPlan, linear_cross_entropy, plan
from flce_dist.arguments.options import ScheduleName
from flce_dist.kernels import gemm
from flce_dist.kernels.logits import eager as eager_logits
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.testing import run_ranks
from tests.flops import gemms_of
from tests.results import FILES
from tests.test_planning import CASES, Case, H, R, small

__all__ = ["small"]  # a fixture


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("compiled", "filtered")])
def test_gemms_are_those_that_the_call_makes(name: str) -> None:
    case = Case(name)
    with case.context:
        told = case.plan()
        columns = H + (R if "low_rank" in case.options else 0)
        gemms = gemms_of(case.step, told.tokens, told.columns, columns)
    assert gemms == pytest.approx(told.forward_gemms + told.backward_gemms)
    assert f"GEMMs: {told.forward_gemms:.3g} in forward" in str(told)


WITH_SECTIONS = "ecfd2de2"  # before it all chunks' tokens were gathered at once


def measured_calls() -> Iterator[tuple[dict[str, Any], CallPlan]]:
    """Records of the loss in result files that have its memory, each with its plan."""
    for file in sorted(FILES.glob("bench-*.json")):
        content = json.loads(file.read_text())
        has_sections = content.get("about", {}).get("commit") == WITH_SECTIONS
        for record in content.get("records", []):
            if is_of_the_loss(record):
                sizes = {name: record[name] for name in ("T", "H", "V", "P")}
                told = planned_call(record, **sizes)
                if record["P"] == 1 or len(told.chunks) == 1 or has_sections:
                    yield record, told


def is_of_the_loss(record: dict[str, Any]) -> bool:
    is_ours = record.get("impl") == "triton" and record.get("op") == "linear_cross_entropy"
    if not is_ours or record["dtype"] != "bf16" or record["workspace_mib"] is None:
        return False
    others = ("over", "best", "divergence", "filter_eps")
    is_other = any(record.get(name) for name in others)
    return not is_other and record["schedule"] in (*get_args(ScheduleName), None)


def planned_call(record: dict[str, Any], T: int, H: int, V: int, P: int) -> CallPlan:
    options: dict[str, Any] = {
        "schedule": record["schedule"] or "auto",
        "max_logits_bytes": record["max_logits_bytes"],
        "sequence_parallel": record["sequence_parallel"] and P > 1,
        "skip_ignored": record.get("skip_ignored") or False,
    }
    if record.get("max_counted"):
        options["max_counted"] = round(T * record["counted"])
    if record.get("per_token"):
        options["reduction"] = "none"
    has_gradients = record["mode"] != "forward"
    trains_weight = has_gradients and not record.get("frozen")
    rank = record.get("low_rank")
    with torch.device("meta"):
        tokens = T // P if options["sequence_parallel"] else T
        hidden = torch.empty(tokens, H, dtype=torch.bfloat16, requires_grad=has_gradients)
        weight = torch.empty(V // P, H, dtype=torch.bfloat16, requires_grad=trains_weight)
        if rank:
            pair = (torch.empty(n, rank, dtype=torch.bfloat16) for n in (tokens, V // P))
            options["low_rank"] = tuple(x.requires_grad_() for x in pair)
    return plan(hidden, weight, (T,), tp_size=P if P > 1 else None, **options)


def test_bytes_are_those_measured_on_gpus() -> None:
    """Within 20 MiB of one call's peak; where chunks, ranks and chosen tokens meet, a fifth."""
    calls = list(measured_calls())
    assert len(calls) > 100
    for record, told in calls:
        mib = told.total_bytes / 2**20
        measured = record["workspace_mib"]
        slack = 20.0
        if record.get("max_counted") or record["P"] > 1:
            slack += 0.2 * measured
        assert abs(mib - measured) <= slack, (record, told)


@pytest.mark.parametrize("P, accumulators", [(1, 0), (2, 1)])
def test_fp16_keeps_dhidden_in_fp32_until_a_loss_scale_arrives(P: int, accumulators: int) -> None:
    T, wide = 8192, 4 * 8192 * 64
    shapes = ((T, 64), (32000 // P, 64), (T,))
    told = plan(*shapes, dtype=torch.float16, schedule="in_forward", tp_size=P)
    dweight_before_rounding = 2 * 64 * told.columns
    rest = told.total_bytes - told.logits_bytes - dweight_before_rounding - 64 * T
    travels = 0 if P == 1 else wide // 2
    assert rest == wide // 2 + accumulators * wide + travels


@pytest.mark.parametrize("frozen", ["", "hidden", "weight"])
def test_what_sections_take_does_not_grow_with_tokens(frozen: str) -> None:
    """But for the numbers of each token."""

    def told(T: int) -> int:
        with torch.device("meta"):
            hidden = torch.empty(T // 2, 64, requires_grad=frozen != "hidden")
            weight = torch.empty(16000, 64, requires_grad=frozen != "weight")
        options: dict[str, Any] = {"schedule": "in_forward", "max_logits_bytes": 1}
        return plan(hidden, weight, (T,), tp_size=2, sequence_parallel=True, **options).total_bytes

    assert told(16384) - told(4096) == (16384 - 4096) * 64


def told_and_allocated(
    group: dist.ProcessGroup, T: int, H: int, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[int, int]:
    """Bytes of a step beyond operands and gradients on rank 0: the plan's, and those allocated.

    The least of several steps: on a busy machine another rank's thread may keep a message longer.
    """
    rows = T // group.size() if options["sequence_parallel"] else T
    hidden = torch.zeros(rows, H, dtype=dtype, requires_grad=True)
    weight = torch.zeros(64, H, dtype=dtype, requires_grad=True)
    operands = hidden, weight, torch.arange(T) % 128
    told = plan(*operands, tp_group=group, **options).total_bytes
    allocated = []
    for _ in range(3):
        hidden.grad = weight.grad = None
        with peak_memory("cpu") if group.rank() == 0 else nullcontext() as peak:
            linear_cross_entropy(*operands, tp_group=group, **options).backward()
        allocated.append(peak.bytes - hidden.nbytes - weight.nbytes if peak else 0)
    return told, min(allocated)


@pytest.fixture
def little_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of temporaries that only a CPU has."""
    monkeypatch.setattr(eager_logits, "SCRATCH_BYTES", 1 << 16)
    monkeypatch.setattr(gemm, "_UPCAST_BYTES", 1 << 17)


BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.usefixtures("little_scratch")
@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize(
    ("dtype", "schedule", "budget"),
    [(BF16, "cached", None), (BF16, "in_forward", None), (BF16, "in_forward", 1),
     (FP16, "cached", None), (FP16, "in_forward", None)],
)  # fmt: skip
def test_bytes_are_those_that_a_rank_allocates(
    dtype: torch.dtype, schedule: Any, budget: int | None, in_fp32: bool
) -> None:
    """Under sequence parallelism, whose shares of dhidden may be twice as wide."""
    options: dict[str, Any] = {"schedule": schedule, "max_logits_bytes": budget}
    options |= {"sequence_parallel": True, "reduce_in_fp32": in_fp32}
    T, H = 4096, 512
    told, allocated = run_ranks(lambda g: told_and_allocated(g, T, H, dtype, options), 2)[0]
    assert told == pytest.approx(allocated, abs=T * H * 2 // 16)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_replicated_dhidden_is_summed_in_fp32(dtype: torch.dtype) -> None:
    """Its share is as wide as that of a call in fp32."""
    T, H = 512, 64

    def told(**options: Any) -> int:
        shapes = (T, H), (4096, H), (T,)
        return plan(*shapes, dtype=dtype, tp_size=2, schedule="recompute", **options).total_bytes

    assert told(reduce_in_fp32=True) - told() == T * H * (4 - dtype.itemsize)
