"""The benchmark of filtered gradients, of seconds on CPU, and the problems that it makes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro")
pytest.importorskip("rich")

from flce_dist import frequency_order
from flce_dist.launch.bench import filtered
from flce_dist.launch.bench.problem import make_truth
from flce_dist.launch.bench.trained_head import Order, TrainedHead, dropped, make_problem
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.testing import RankPool, relative_rms
from tests.filtered_formula import filtered_gradients, zipf_inputs
from tests.problems import Inputs

T, V, H, EPS = 256, 2048, 16, 2.0**-10


def head(dtype: torch.dtype = torch.float32) -> TrainedHead:
    """A head whose rows of like frequency are far apart."""
    given = zipf_inputs(T, V, H, dtype, ignored=0.0)
    place = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    weight, counts = torch.empty_like(given.weight), torch.empty(V, dtype=torch.long)
    weight[place], counts[place] = given.weight, torch.arange(V, 0, -1)
    return TrainedHead(given.hidden, weight, place[given.labels], counts)


def arguments(tmp_path: Path) -> list[str]:
    torch.save(vars(head()), tmp_path / "head.pt")
    fast = ["--rounds", "2", "--sample-ms", "0.1", "--settle-ms", "0.1", "--widen", "2"]
    paths = ["--head", str(tmp_path / "head.pt"), "--out", str(tmp_path / "found")]
    return [*paths, "--device", "cpu", *fast]


def test_both_orders_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert filtered.main(arguments(tmp_path)) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    records = found["records"]
    assert found["about"]["config"]["widen"] == 2 and found["about"]["ranks"] == 1
    for record in records:
        assert record["status"] == "ok", record["message"]
        assert (record["T"], record["H"], record["V"]) == (T, 2 * H, V)
        if record["impl"] not in ("gemm3", "dropped", "dropped_dhidden"):
            assert record["ratio"] > 0 and record["workspace_mib"] > 0
            budget = 1e-5 if record["filter_eps"] is None else 0.02
            assert max(record[f"d{x}_error"] for x in ("hidden", "weight")) < budget
    at_eps = [r for r in records if r["filter_eps"] == EPS]
    by_order = {r["order"]: r for r in at_eps if r["impl"] == "eager"}
    assert 0.1 < by_order["frequency"]["kept_share"] < 0.9
    assert by_order["frequency"]["rank_one_mass"] > 0
    assert by_order["frequency"]["dhidden_error"] > 1e-5  # an approximation
    assert by_order["tokenizer"]["kept_share"] > 0.95
    _, both, in_dhidden = (r for r in at_eps if r["order"] == "frequency")
    assert both["kept_share"] == by_order["frequency"]["kept_share"]
    assert both["dhidden_error"] == in_dhidden["dhidden_error"]
    assert both["dhidden_error"] > by_order["frequency"]["dhidden_error"]
    assert in_dhidden["dweight_error"] == 0 < both["dweight_error"]
    assert "tokenizer order: T=256 H=32 V=2048 fp32" in capsys.readouterr().out


def rank_main(group: Any, arguments: list[str]) -> int:
    return filtered.main(arguments)


def test_ranks_split_rows_and_tokens(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        assert pool.run(rank_main, arguments(tmp_path)) == [0, 0]
    records = json.loads((tmp_path / "found.json").read_text())["records"]
    names = ["gemm3", "eager", "eager", "eager", "eager"]
    assert [record["impl"] for record in records] == names
    assert all(record["status"] == "ok" and record["P"] == 2 for record in records)
    assert all(record["sequence_parallel"] for record in records[1:])
    assert 0.1 < records[-1]["kept_share"] < 0.9


@pytest.mark.parametrize("order", ["frequency", "tokenizer"])
def test_a_problem_has_the_loss_and_gradients_of_the_head(order: Order) -> None:
    given = head()
    problem = make_problem(given, order, 2, None)
    truth = make_truth(problem, gradients=True)
    hidden, weight = (x.double().requires_grad_() for x in (given.hidden, given.weight))
    loss = torch.nn.functional.cross_entropy(hidden @ weight.T, given.labels)
    loss.backward()
    assert truth.loss == pytest.approx(loss.item(), rel=1e-6)
    assert truth.dhidden is not None and truth.dweight is not None
    assert hidden.grad is not None and weight.grad is not None
    rows = frequency_order(given.counts).token_of_row if order == "frequency" else slice(None)
    for copy in range(2):
        features = slice(copy * H, (copy + 1) * H)
        assert relative_rms(truth.dhidden[:, features], hidden.grad / 2**0.5) < 1e-6
        assert relative_rms(truth.dweight[:, features], weight.grad[rows] / 2**0.5) < 1e-6


def test_another_file_is_refused(tmp_path: Path) -> None:
    torch.save({"hidden": torch.zeros(1)}, tmp_path / "head.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("no file of torch.save")
    for name in ("empty.pt", "text.pt", "nowhere.pt"):
        with pytest.raises(ConfigError, match=f"head must be a file of .*, got .*{name}"):
            TrainedHead.load(tmp_path / name, torch.device("cpu"), T)
    with pytest.raises(ConfigError, match="dictionary of hidden, weight, labels and counts"):
        TrainedHead.load(tmp_path / "head.pt", torch.device("cpu"), T)


def test_dropped_tiles_are_those_of_the_definition() -> None:
    given = zipf_inputs(T - 50, V + 70, H, ignored=0.0)  # neither fills its tiles
    counts = torch.arange(V + 70, 0, -1)
    found = TrainedHead(given.hidden, given.weight, given.labels, counts)
    problem = make_problem(found, "frequency", 1, None)
    dhidden, dweight, _ = dropped(problem, EPS)
    inputs = Inputs(problem.hidden, problem.weight, problem.labels)
    wanted = filtered_gradients(inputs, EPS, drops=True)
    assert relative_rms(dhidden, wanted["dhidden"]) < 1e-12
    assert relative_rms(dweight, wanted["dweight"]) < 1e-12
