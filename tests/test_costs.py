"""GEMMs and bytes that ``plan`` tells: those that calls make, and that were measured on GPUs."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

from flce_dist import CallPlan, plan
from flce_dist.arguments.options import ScheduleName
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
