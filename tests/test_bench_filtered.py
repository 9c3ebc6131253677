"""The benchmark on the head of a trained model, of seconds on CPU, and the problem it makes."""

from pathlib import Path

import pytest
import torch

from flce_dist.filtered import frequency_order
from flce_dist.launch.bench import peers
from flce_dist.launch.bench.problem import load_head, make_truth
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.testing import relative_rms
from tests.bench_run import SETTINGS, records, run
from tests.filtered_formula import filtered_gradients, zipf_inputs
from tests.on_ranks import on_ranks

T, V, H, EPS = 256, 2048, 16, 2.0**-10
GRID = f"{SETTINGS}widen: 2\nruns:\n"
RUNS = """
  - {impl: eager, schedule: cached, sequence_parallel: true}
  - {impl: eager, filter_eps: 0.0009765625, sequence_parallel: true}
"""


def content() -> dict[str, torch.Tensor]:
    """A head whose rows of like frequency are far apart."""
    given = zipf_inputs(T, V, H, torch.float32, ignored=0.0)
    place = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    weight, counts = torch.empty_like(given.weight), torch.empty(V, dtype=torch.long)
    weight[place], counts[place] = given.weight, torch.arange(V, 0, -1)
    labels = place[given.labels]
    return {"hidden": given.hidden, "weight": weight, "labels": labels, "counts": counts}


def bench(tmp_path: Path, runs: str = RUNS) -> int:
    torch.save(content(), tmp_path / "head.pt")
    return run(tmp_path, runs, "--head", str(tmp_path / "head.pt"), grid=GRID)


def test_a_head_is_measured_with_what_it_filters(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peers, "DROPPED_EPS", EPS)
    assert bench(tmp_path, RUNS + "  - {impl: dropped}\n  - {impl: dropped_dhidden}\n") == 0
    _, exact, filtered, dropped, of_dhidden = records(tmp_path)
    for record in (exact, filtered, dropped, of_dhidden):
        assert (record.T, record.H, record.V) == (T, 2 * H, V)
        assert record.status == ("ok" if record.impl == "eager" else "wrong"), record.message
        assert record.ratio > 0 and record.workspace_mib > 0
    assert max(exact.dhidden_error, exact.dweight_error) < 1e-5 and exact.kept_share is None
    assert 1e-5 < filtered.dhidden_error < 0.02 and filtered.dweight_error < 0.02
    assert 0.1 < filtered.kept_share < 0.9 and filtered.rank_one_mass > 0
    assert dropped.dhidden_error == of_dhidden.dhidden_error > filtered.dhidden_error
    assert dropped.dweight_error > of_dhidden.dweight_error < 1e-5
    assert "kept" in capsys.readouterr().out


def test_a_head_is_known_by_its_digest(tmp_path, capsys):
    runs = "  - {impl: eager}\n"
    assert bench(tmp_path, runs) == 0
    again = run(tmp_path, runs, "--head", str(tmp_path / "head.pt"), grid=GRID)
    assert again == 0 and "measured before" in capsys.readouterr().out
    given = content()
    torch.save({**given, "weight": 2 * given["weight"]}, tmp_path / "head.pt")
    with pytest.raises(ConfigError, match=r"head\.sha256 is .* there and .* here.*--fresh"):
        run(tmp_path, runs, "--head", str(tmp_path / "head.pt"), grid=GRID)


@on_ranks(2)
def test_ranks_split_rows_and_tokens(group, tmp_path):
    own = tmp_path / str(group.rank())
    own.mkdir()
    assert bench(own) == 0
    if group.rank() != 0:
        return
    _, exact, filtered = records(own)
    assert exact.P == 2 and exact.sequence_parallel and exact.dhidden_error < 1e-5
    assert filtered.status == "ok" and 0.1 < filtered.kept_share < 0.9


def test_a_problem_has_the_loss_and_gradients_of_the_head(tmp_path):
    given = content()
    torch.save(given, tmp_path / "head.pt")
    problem = load_head(tmp_path / "head.pt", 2)
    truth = make_truth(problem, gradients=True)
    hidden, weight = (given[name].double().requires_grad_() for name in ("hidden", "weight"))
    loss = torch.nn.functional.cross_entropy(hidden @ weight.T, given["labels"])
    loss.backward()
    assert truth.loss == pytest.approx(loss.item(), rel=1e-6)
    assert truth.dhidden is not None and truth.dweight is not None
    assert hidden.grad is not None and weight.grad is not None
    rows = frequency_order(given["counts"]).token_of_row
    for copy in range(2):
        features = slice(copy * H, (copy + 1) * H)
        assert relative_rms(truth.dhidden[:, features], hidden.grad / 2**0.5) < 1e-6
        assert relative_rms(truth.dweight[:, features], weight.grad[rows] / 2**0.5) < 1e-6


@pytest.mark.parametrize("drops_dweight", [True, False])
def test_dropped_tiles_are_those_of_the_definition(drops_dweight, monkeypatch):
    monkeypatch.setattr(peers, "DROPPED_EPS", EPS)
    given = zipf_inputs(T - 50, V + 70, H, torch.float32, ignored=0.0)  # neither fills its tiles
    wanted = filtered_gradients(given, EPS, drops=True)
    exact = filtered_gradients(given, 1e-12, drops=True)
    hidden, weight = (x.clone().requires_grad_() for x in (given.hidden, given.weight))
    name = "dropped" if drops_dweight else "dropped_dhidden"
    peers.load_peer(name, None)(hidden, weight, given.labels).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert relative_rms(hidden.grad, wanted["dhidden"]) < 1e-5
    dweight = (wanted if drops_dweight else exact)["dweight"]
    assert relative_rms(weight.grad, dweight) < 1e-5
    assert relative_rms(exact["dhidden"], wanted["dhidden"]) > 1e-3


@pytest.mark.parametrize(("name", "change", "message"), [
    ("hidden", lambda x: x[:-1], r"hidden must be \(256, 16\) beside .*, got \(255, 16\)"),
    ("hidden", lambda x: x.double(), "of one dtype, one of torch.bfloat16, .*, got torch.float64 "),
    ("counts", lambda x: x[1:], r"counts must be \(2048,\) beside .*, got \(2047,\)"),
    ("labels", lambda x: x.clone().fill_(-100), r"within \[0, 2048\), got -100 to -100"),
    ("labels", lambda x: x + 2048, r"labels must be ids within \[0, 2048\), got 20"),
])  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(tmp_path, name, change, message):
    """A label below 0 counted from the end."""
    given = content()
    torch.save({**given, name: change(given[name])}, tmp_path / "head.pt")
    with pytest.raises(ConfigError, match=rf"^head: .*head\.pt: .*{message}"):
        load_head(tmp_path / "head.pt", 1)


def test_another_file_is_refused(tmp_path):
    torch.save({"hidden": torch.zeros(1)}, tmp_path / "head.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("no file of torch.save")
    for name in ("empty.pt", "text.pt", "nowhere.pt", "head.pt"):
        with pytest.raises(ConfigError, match=f"dictionary of hidden, weight, .*, got .*{name}"):
            load_head(tmp_path / name, 1)
    with pytest.raises(ConfigError, match="head has a shape of its own"):
        run(tmp_path, RUNS, "--head", "head.pt")
