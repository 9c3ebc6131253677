"""How ``launch.verify`` reports: the worst rank, each miss, JSON."""

import json
from typing import Any

import pytest
import torch.distributed as dist

from flce_dist.launch.verify import __main__ as verify
from flce_dist.launch.verify.cases import Shape, cases, variants
from flce_dist.launch.verify.report import Record, summary, worst_of_ranks
from flce_dist.testing import ErrorBudget


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
    monkeypatch.setattr(verify, "_tables", lambda *args: [[record(float("nan"))]])
    assert verify.main(["--device", "cpu", "--output", str(tmp_path / "verify.json")]) == 1
    text = (tmp_path / "verify.json").read_text()
    assert "NaN" not in text
    (found,) = json.loads(text)["records"]
    assert found["checks"]["loss"] == {"error": None, "budget": 1.0} and not found["met"]


def test_a_table_is_printed_once_it_is_measured(monkeypatch, capsys):
    def one_and_an_interrupt(*args):
        yield [record(0.5)]
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "_tables", one_and_an_interrupt)
    with pytest.raises(KeyboardInterrupt):
        verify.main(["--device", "cpu"])
    assert "fp32, T=1 H=2 V=3: error / budget" in capsys.readouterr().out


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
