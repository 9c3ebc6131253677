"""``launch.verify``: passes what is right, and misses nothing that is wrong."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flce_dist
from flce_dist.launch.verify import __main__ as verify
from flce_dist.launch.verify import checks as verify_checks
from flce_dist.launch.verify.cases import (
    Case,
    Shape,
    cases,
    default_shapes,
    make_data,
    part_cached_budget,
    variants,
)
from flce_dist.launch.verify.report import Record, summary, tables, worst_of_ranks
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.op import prepare
from flce_dist.op.plan import Plan, plan
from flce_dist.testing import ErrorBudget
from tests.processes import started, torchrun

ROOT = Path(__file__).parent.parent
SMALL = ["--device", "cpu", "--dtypes", "fp32", "--shapes", "24", "64", "200"]


def run(*args: str) -> int:
    return verify.main([*SMALL, *args])


def verify_rank(group: dist.ProcessGroup, fault: str | None, *args: str) -> int:
    """Run verify on one rank, with ``fault`` planted on the last rank if it names one."""
    if fault is not None and group.rank() == group.size() - 1:
        plant(FAULTS[fault], lambda name, value: setattr(verify_checks, name, value))
    return run(*args)


def plant(fault, set_attribute) -> None:
    for name in ("linear_cross_entropy", "linear_cross_entropy_with_metrics"):
        set_attribute(name, functools.partial(fault, getattr(flce_dist, name)))


def zero_gradients(call, hidden, weight, labels, **kwargs):
    out = call(hidden.detach(), weight.detach(), labels, **kwargs)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    attached = loss + 0 * (hidden.nan_to_num().sum() + weight.sum())
    return attached if loss is out else out._replace(loss=attached)


def wrong_rows(call, hidden, weight, labels, **kwargs):
    """Labels are looked up one row too far."""
    shifted = labels.where(labels < 1, labels - 1)
    return call(hidden, weight, shifted, **kwargs)


def loss_off_by_1e_4(call, *args, **kwargs):
    out = call(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        return out * 1.0001
    return out._replace(loss=out.loss * 1.0001)


def gradient_off_by_1_percent(call, hidden, *args, **kwargs):
    return call(hidden + 0.01 * (hidden - hidden.detach()), *args, **kwargs)


def smoothing_of_the_shard(call, hidden, weight, labels, *, label_smoothing=0.0, **kwargs):
    return call(hidden, weight, labels, label_smoothing=label_smoothing * 0.5, **kwargs)


def raises(call, *args, **kwargs):
    raise RuntimeError("kernel does not compile")


FAULTS = {
    fault.__name__: fault
    for fault in (
        zero_gradients,
        wrong_rows,
        loss_off_by_1e_4,
        gradient_off_by_1_percent,
        smoothing_of_the_shard,
        raises,
    )
}


def test_passes_in_one_process_in_every_dtype(capsys):
    assert verify.main(["--device", "cpu", "--shapes", "24", "64", "200"]) == 0
    printed = capsys.readouterr().out
    assert "PASS: " in printed
    assert f"torch {torch.__version__}" in printed
    for dtype in ("fp32", "bf16", "fp16"):
        assert f"{dtype}, T=24 H=64 V=200: error / budget" in printed


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_missed_in_one_process(fault, monkeypatch, capsys):
    plant(FAULTS[fault], functools.partial(monkeypatch.setattr, verify_checks))
    assert run() == 1
    assert "FAIL: " in capsys.readouterr().out


@pytest.mark.parametrize("fault", [None, "gradient_off_by_1_percent", "loss_off_by_1e_4"])
def test_all_ranks_agree_on_the_verdict(gloo_ranks, fault, tmp_path):
    """The fault is on one rank only; every rank exits with the same status."""
    output = tmp_path / "verify.json"
    codes = gloo_ranks(2).run(verify_rank, fault, "--output", str(output))
    gloo_ranks(2).close()  # the fault stays in the last worker
    assert codes == ([0, 0] if fault is None else [1, 1])
    found = json.loads(output.read_text())
    assert found["passed"] is (fault is None)
    assert found["ranks"] == 2
    assert len(found["records"]) > 90
    if fault == "loss_off_by_1e_4":
        differ = [r["checks"]["same loss"]["error"] for r in found["records"]]
        assert all(error > 0 for error in differ)


def test_over_two_nodes(tmp_path):
    report = tmp_path / "verify.json"
    program = ["-m", "flce_dist.launch.verify", *SMALL, "--output", str(report)]
    with started(torchrun(*program, nodes=2), tmp_path, copies=2) as nodes:
        statuses, texts = nodes.finish()
    assert statuses == [0, 0], texts
    found = json.loads(report.read_text())
    assert found["passed"] and found["ranks"] == 2 and len(found["records"]) > 20
    printed = [re.search(r"PASS: (\d+) of \1 cases .* 2 x CPU", text) is not None for text in texts]
    assert sorted(printed) == [False, True], texts  # by rank 0 alone


def test_nothing_verified_is_not_a_pass(monkeypatch, capsys):
    monkeypatch.setattr(verify, "_fits", lambda *args: False)
    assert run() == 1
    assert "do not fit into memory" in capsys.readouterr().out


def test_every_schedule_reduction_and_option_has_a_case():
    schedules: Any = ("recompute", "cached", "in_forward", "auto")
    found = [case for variant in variants() for case in cases(variant, schedules, 2, None)]
    plain = {(c.schedule, c.variant.reduction, c.sequence_parallel) for c in found}
    assert len(plain) == 4 * 3 * 2 - 2  # in_forward has no reduction="none"
    options = {name for case in found for name, _ in case.variant.options}
    assert options == {"label_smoothing", "z_loss_weight", "softcap", "logit_scale"}
    assert {c.schedule for c in found if c.variant.uneven} == set(schedules)
    alone = [case for variant in variants() for case in cases(variant, schedules, 1, None)]
    assert not any(case.sequence_parallel for case in alone)


def plans_of(case: Case, shape: Shape, dtype: torch.dtype, monkeypatch: Any) -> list[Plan]:
    """Run ``case`` on one rank and return what its calls planned."""
    seen: list[Plan] = []

    def spy(**kwargs: Any) -> Plan:
        seen.append(plan(**kwargs))
        return seen[-1]

    monkeypatch.setattr(prepare, "plan", spy)
    data = make_data(case.variant, shape, 1, dtype, torch.device("cpu"), seed=0)
    truth = verify_checks.make_truth(data, case.variant, metric_gradients=False)
    checks = verify_checks.run_case(case, data, truth, None, None)
    assert all(check.met for check in checks.values()), checks
    return seen


@pytest.mark.parametrize("dtype", verify.DTYPES.values(), ids=str)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_part_is_really_cached_by_default(device_type, dtype, monkeypatch):
    """Whatever the window takes of a budget: columns are cached and others recomputed."""
    *_, wide = default_shapes(device_type, 1)
    budget = part_cached_budget(wide, 1, dtype)
    found = [c for v in variants() for c in cases(v, ("cached",), 1, budget) if c.max_logits_bytes]
    assert [case.variant.reduction for case in found] == ["mean", "sum", "none"]
    (chosen,) = plans_of(found[0], wide, dtype, monkeypatch)
    assert (chosen.T, chosen.V) == (wide.T, wide.V_all)
    assert 0 < chosen.cached_v < chosen.V


@pytest.mark.parametrize("dtype", verify.DTYPES.values(), ids=str)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_is_called_part_cached_is(device_type, P, dtype):
    """On any number of ranks, at the wide shape; elsewhere it is, or there is no such case."""
    shapes = default_shapes(device_type, P)
    budgets = {shape: part_cached_budget(shape, P, dtype) for shape in shapes}
    assert budgets[shapes[-1]] is not None
    for shape, budget in budgets.items():
        if budget is None:
            continue
        T, V = -(-shape.T // P) * P, -(-shape.V_all // P)
        chosen = plan(
            T=T, V=V, itemsize=dtype.itemsize, schedule="cached", max_logits_bytes=budget,
            converts=dtype == torch.float16,
        )  # fmt: skip
        assert 0 < chosen.cached_v < V
    (plain, *_) = variants()
    assert not any(case.max_logits_bytes for case in cases(plain, ("cached",), P, None))


def test_data_hold_the_tokens_that_break_losses():
    data = make_data(
        variants()[0], Shape(33, 64, 200), P=4, dtype=torch.float32, device=torch.device("cpu"),
        seed=0,
    )  # fmt: skip
    assert data.hidden.shape == (36, 64)
    assert data.weight.shape == (200, 64)
    ignored = data.labels == -100
    assert 0 < ignored.sum() < 18
    assert data.hidden[ignored].isnan().all() and not data.hidden[~ignored].isnan().any()
    logits = data.hidden[~ignored] @ data.weight.T
    loss = torch.nn.functional.cross_entropy(logits, data.labels[~ignored], reduction="none")
    assert loss.max() > 100
    assert loss.min() < 0.1


def record(error: float, budget: float = 1.0, failure: str | None = None) -> Record:
    (case, *_) = cases(variants()[0], ("cached",), 1, None)
    return Record("fp32", Shape(1, 2, 3), case, {"loss": ErrorBudget(error, budget)}, failure)


class OneOf:
    """A group of ranks that have these records."""

    def __init__(self, *records: Record):
        self.records = records

    def size(self) -> int:
        return len(self.records)


@pytest.mark.parametrize("worst", [record(2.0), record(float("nan")), record(0.5, failure="boom")])
def test_the_worst_rank_counts(worst, monkeypatch):
    group: Any = OneOf(record(0.5), worst, record(0.1))

    def gather(out, records, group):
        out[:] = [[record] for record in group.records]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    (merged,) = worst_of_ranks([record(0.5)], group)
    assert not merged.met
    assert record(0.5).met
    if worst.failure:
        assert merged.failure == "rank 1: boom"


def test_an_error_that_is_not_finite_is_null_in_json(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "_run", lambda *args: [record(float("nan"))])
    assert run("--output", str(tmp_path / "verify.json")) == 1
    text = (tmp_path / "verify.json").read_text()
    assert "NaN" not in text
    (found,) = json.loads(text)["records"]
    assert found["checks"]["loss"] == {"error": None, "budget": 1.0} and not found["met"]


def test_summary_names_each_miss():
    facts = dict.fromkeys(
        (
            "flce_dist",
            "commit",
            "torch",
            "triton",
            "cuda",
            "nccl",
            "python",
            "hardware",
            "ranks",
            "seconds",
        )
    )
    lines = summary([record(0.5), record(2.0), record(0.1, failure="boom")], facts)
    assert lines[0].startswith("MISS fp32 (1, 2, 3) plain (mean), cached: loss error 2 exceeds")
    assert lines[1].endswith("boom")
    assert lines[2].startswith("FAIL: 1 of 3 cases")
    assert len(tables([record(0.5), dataclasses.replace(record(2.0), dtype="bf16")])) == 2


def test_wrong_arguments_name_themselves(capsys):
    with pytest.raises(SystemExit) as ended:
        verify.main(["--schedules", "cashed"])
    assert ended.value.code != 0
    assert "cashed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, message",
    [
        (["--shapes", "8", "0", "16"], r"^shapes\[0\]\[1\] must be an int within .*, got 0$"),
        (["--seed=-1"], r"^seed must be an int within \[0, 2\*\*32\), got -1$"),
        (["--device", "cuda"], "^device=cuda needs a GPU, found none$"),
    ],
)
def test_wrong_values_are_found_before_ranks_meet(args, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        verify.main(args)
