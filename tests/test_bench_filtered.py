"""The benchmark of filtered gradients, of seconds on CPU, and the problems that it makes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro")
pytest.importorskip("rich")

from flce_dist import frequency_order, linear_cross_entropy_with_metrics
from flce_dist.launch.bench import filtered
from flce_dist.launch.bench.problem import make_truth
from flce_dist.launch.bench.trained_head import Part, TrainedHead, dropped, make_part
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.testing import RankPool, relative_rms
from tests.filtered_formula import filtered_gradients, zipf_inputs
from tests.problems import Inputs

T, V, H, EPS = 256, 2048, 16, 2.0**-10


def head(dtype: torch.dtype = torch.float32) -> TrainedHead:
    return as_head(zipf_inputs(T, V, H, dtype, ignored=0.0))


def as_head(given: Inputs) -> TrainedHead:
    """Rows of ``given`` are in order of frequency; here like frequencies are far apart."""
    V = len(given.weight)
    place = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    weight, counts = torch.empty_like(given.weight), torch.empty(V, dtype=torch.long)
    weight[place], counts[place] = given.weight, torch.arange(V, 0, -1)
    return TrainedHead(given.hidden, weight, place[given.labels], counts)


def arguments(tmp_path: Path) -> list[str]:
    torch.save(vars(head()), tmp_path / "head.pt")
    fast = ["--rounds", "2", "--sample-ms", "0.1", "--settle-ms", "0.1", "--widen", "2"]
    paths = ["--head", str(tmp_path / "head.pt"), "--out", str(tmp_path / "found")]
    return [*paths, "--device", "cpu", *fast]


def test_all_parts_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert filtered.main(arguments(tmp_path)) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    records = found["records"]
    parts = {(r["order"], r["shards"], r["shard"]) for r in records}
    assert parts == {("frequency", 1, 0), ("tokenizer", 1, 0), ("frequency", 4, 0),
                     ("frequency", 4, 3), ("frequency", 8, 0), ("frequency", 8, 7)}  # fmt: skip
    assert found["about"]["config"]["widen"] == 2 and found["about"]["ranks"] == 1
    for record in records:
        assert record["status"] == "ok", record["message"]
        assert record["H"] == 2 * H and record["V"] == V // record["shards"]
        if record["impl"] not in ("gemm3", "dropped", "dropped_dhidden"):
            assert record["ratio"] > 0 and record["workspace_mib"] > 0
            budget = 1e-5 if record["filter_eps"] is None else 0.02
            assert max(record[f"d{x}_error"] for x in ("hidden", "weight")) < budget
    by_run = {(r["order"], r["shards"], r["impl"], r["filter_eps"]): r for r in records}
    filtering, leaving_out = (by_run["frequency", 1, impl, EPS] for impl in ("eager", "dropped"))
    assert 0.1 < filtering["kept_share"] < 0.9 and filtering["rank_one_mass"] > 0
    assert filtering["kept_share"] == leaving_out["kept_share"]
    assert filtering["dhidden_error"] < leaving_out["dhidden_error"]
    in_dhidden = by_run["frequency", 1, "dropped_dhidden", EPS]
    assert in_dhidden["dhidden_error"] == leaving_out["dhidden_error"]
    assert in_dhidden["dweight_error"] == 0 < leaving_out["dweight_error"]
    assert by_run["tokenizer", 1, "eager", EPS]["kept_share"] > 0.95
    assert len(found["rows"]) == 3 * 5  # buckets, runs
    assert {(r["batches"], r["T"], r["H"]) for r in found["rows"]} == {(1, T, H)}
    out = capsys.readouterr().out
    assert "frequency order, shard 7 of 8: T=256 H=32 V=256 fp32" in out
    assert "rows by frequency: 1 x T=256 H=16 V=2048 fp32" in out


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shard", [0, 3])
def test_a_shard_has_the_gradients_of_the_whole_vocabulary(dtype: torch.dtype, shard: int) -> None:
    given, rows = head(dtype), V // 4
    here = slice(shard * rows, (shard + 1) * rows)
    part = make_part(given, Part("frequency", 4, shard), 2, None)
    assert part.problem.weight.shape == (rows, 2 * H)
    truth = make_truth(part.problem, gradients=True)
    assert truth.dhidden is not None and truth.dweight is not None

    eps = 2.0**-6
    order = frequency_order(given.counts)
    z = given.hidden.double() @ given.weight[order.token_of_row].double().T
    dz = z.softmax(1)
    likely = dz[:, here].view(2, 128, -1, 256).amax((1, 3)) >= eps
    dz[torch.arange(T), order.row_of_token[given.labels]] -= 1.0
    mine = torch.zeros(V, dtype=torch.bool)
    mine[here] = part.rows
    has_label = (dz[:, here] < 0).view(2, 128, -1, 256).any(3).any(1)
    operands = (part.problem.hidden, part.problem.weight, part.problem.labels)
    found = linear_cross_entropy_with_metrics(
        *(x.requires_grad_(x.is_floating_point()) for x in operands), filter_eps=eps
    )
    assert float(found.kept_share) == pytest.approx(float((likely | has_label).float().mean()))

    dz = dz[:, mine] / T
    wide = given.hidden.double().repeat(1, 2) / 2**0.5
    rounding = 8 * torch.finfo(dtype).eps
    copies = part.columns & (torch.arange(2 * H) % H >= 3)  # the first three features have one copy
    dweight = (dz.T @ wide)[:, copies]
    assert relative_rms(truth.dweight[part.rows][:, copies], dweight) < rounding
    weight = given.weight[order.token_of_row][mine].double().repeat(1, 2) / 2**0.5
    assert relative_rms(truth.dhidden[:, copies], (dz @ weight)[:, copies]) < rounding


def test_dropped_tiles_are_those_of_the_definition() -> None:
    given = as_head(zipf_inputs(T - 50, V + 70, H, ignored=0.0))  # neither fills its tiles
    problem = make_part(given, Part(), 1, None).problem
    dhidden, dweight, _ = dropped(problem, EPS)
    inputs = Inputs(problem.hidden, problem.weight, problem.labels)
    wanted = filtered_gradients(inputs, EPS, drops=True)
    assert relative_rms(dhidden, wanted["dhidden"]) < 1e-12
    assert relative_rms(dweight, wanted["dweight"]) < 1e-12


def test_batches_leave_out_what_does_not_fill_one() -> None:
    given = head()
    first, second = given.batches(100)
    assert torch.equal(torch.cat([first.labels, second.labels]), given.labels[:200])
    assert torch.equal(torch.cat([first.hidden, second.hidden]), given.hidden[:200])
    assert [len(x.labels) for x in given.batches()] == [T]


def test_another_file_is_refused(tmp_path: Path) -> None:
    torch.save({"hidden": torch.zeros(1)}, tmp_path / "head.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("no file of torch.save")
    for name in ("empty.pt", "text.pt", "nowhere.pt"):
        with pytest.raises(ConfigError, match=f"head must be a file of export_head, got .*{name}"):
            TrainedHead.load(tmp_path / name, torch.device("cpu"))
    with pytest.raises(ConfigError, match="head must be a file of export_head"):
        TrainedHead.load(tmp_path / "head.pt", torch.device("cpu"))
