"""``launch.bench`` end to end on CPU: records, judgements, ranks, files."""

import csv
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro")

from flce_dist.launch.bench import __main__ as bench
from flce_dist.launch.bench import loss_functions
from flce_dist.launch.bench.config import floor_of
from flce_dist.launch.bench.divergences import KINDS
from flce_dist.launch.bench.files import read_results
from flce_dist.launch.bench.floors import FLOORS
from flce_dist.launch.bench.peers import PEERS, Peer, canonical
from flce_dist.launch.bench.report import FIELDS
from flce_dist.launch.program import RunError
from flce_dist.launch.yaml_config import ConfigError
from tests.bench_run import EAGER, arguments, peer, records, run
from tests.on_ranks import on_ranks
from tests.processes import started, torchrun

ROOT = Path(__file__).parent.parent


def test_scores_are_measured_beside_the_loss(tmp_path):
    """Over the vocabulary the mean loss of the first id is the loss of the label."""
    of_scores = [
        "{impl: eager, mode: forward, over: vocabulary, ids: 2}",
        "{impl: eager, schedule: cached, over: vocabulary, ids: 3, spread: zipf}",
        "{impl: eager, over: ids, ids: 2, spread: one}",
    ]
    losses = ["{impl: eager, mode: forward}", "{impl: eager, schedule: cached}", "{impl: eager}"]
    assert run(tmp_path, "".join(f"  - {x}\n" for x in losses + of_scores)) == 0
    found = {(r.T, r.run.name): r for r in records(tmp_path)}
    assert len(found) == 2 * (2 + 3 + 3)
    for (T, name), r in found.items():
        if r.op != "linear_logprob":
            assert " over " not in name
            continue
        assert r.status == "ok" and r.floor_ms == found[T, floor_of(r.run)].p50_ms
        assert (r.loss_error is None) == (r.over == "ids")
        assert (r.dweight_error is None) == (r.over == "ids" or r.mode == "forward")


def test_a_frozen_head_with_scores_and_with_low_rank_columns(tmp_path):
    """Against two GEMMs, scores against the loss; LoRA's columns begin at 0 and change nothing."""
    runs = [
        "{impl: eager, frozen: true}",
        "{impl: eager, frozen: true, over: vocabulary, ids: 2}",
        "{impl: eager, frozen: true, low_rank: 3}",
    ]
    assert run(tmp_path, "".join(f"  - {x}\n" for x in runs)) == 0
    found = {(r.T, r.run.name): r for r in records(tmp_path)}
    assert {name for _, name in found} >= {"eager auto frozen low_rank 3", "gemm2"}
    for (T, name), r in found.items():
        if name != "gemm2":
            assert r.status == "ok" and r.floor_ms == found[T, floor_of(r.run)].p50_ms
            assert r.loss_error <= 1e-6 and r.dhidden_error <= 1e-5 and r.dweight_error is None
    with pytest.raises(ConfigError, match=r"^low_rank is of a mean of triton and eager, with froz"):
        run(tmp_path, "  - {impl: eager, low_rank: 3}\n")


def test_best_ids_are_measured_beside_one_gemm(tmp_path):
    """Of ranks the loss is compared; of best ids and samples nothing is."""
    runs = [
        "{impl: eager, mode: forward}",
        "{impl: eager, mode: forward, best: top_k, ids: 3}",
        "{impl: eager, mode: forward, best: rank}",
        "{impl: eager, mode: forward, best: sample}",
    ]
    assert run(tmp_path, "".join(f"  - {x}\n" for x in runs)) == 0
    found = records(tmp_path)
    names = {"eager best K=3 forward", "eager rank forward", "eager sample forward"}
    assert {r.run.name for r in found if r.best is not None} == names
    ops = {"top_k": "linear_top_k", "rank": "linear_top_k", "sample": "linear_sample"}
    for r in found:
        if r.best is not None:
            assert r.status == "ok" and r.op == ops[r.best] and r.ratio is not None
            assert (r.loss_error is not None) == (r.best == "rank")


def test_divergences_are_measured_beside_their_gemms(tmp_path):
    """Ours and PyTorch's with logits are right in every kind; what is not installed says so."""
    runs = [
        f"{{impl: {impl}, divergence: {kind}}}"
        for impl in ("eager", "divergence_with_logits", "trl_divergence", "liger_divergence")
        for kind in KINDS
    ]
    runs += ["{impl: eager, mode: forward, divergence: tv}"]
    runs += ["{impl: eager, schedule: recompute, divergence: jsd}"]
    run(tmp_path, "".join(f"  - {x}\n" for x in runs))
    found = {(r.T, r.run.name): r for r in records(tmp_path)}
    for (T, _), r in found.items():
        if r.divergence is None or r.is_skipped:
            continue
        assert r.op == "linear_divergence" and r.loss_error is not None
        assert r.status == "ok", r.message
        assert r.floor_ms == found[T, floor_of(r.run)].p50_ms
        assert (r.dweight_error is None) == (r.mode == "forward")
    floors = {r.impl for r in found.values() if r.op == "floor"}
    assert floors == {"gemm2_forward", "gemm4", "gemm6"}
    assert found[24, "liger_divergence tv"].is_skipped


def test_smoke_grid_runs_everywhere(tmp_path, capsys):
    config = ROOT / "configs" / "bench" / "smoke.yaml"
    out = ["--out", str(tmp_path / "out" / "found.v1"), "--device", "cpu"]
    assert bench.main(["--config", str(config), *out]) == 0
    about, _ = read_results(tmp_path / "out" / "found.v1.json")
    found = records(tmp_path)
    assert about["hardware"].startswith("CPU") and about["torch"] == torch.__version__
    assert about["config"]["rounds"] == 3 and about["ranks"] == 1

    ours = [record for record in found if record.impl == "eager"]
    schedules = None, "recompute", "cached", "in_forward", "auto"
    assert {record.schedule for record in ours} == {*schedules}
    floors = {(r.T, r.impl): r.p50_ms for r in found if r.op == "floor"}
    for record in found:
        assert record.status in ("ok", "skipped"), record
        if record.status == "skipped":
            assert record.impl in ("liger", "torch_linear_cross_entropy")
            assert record.message and record.p50_ms is None
            continue
        assert 0 < record.p20_ms <= record.p50_ms <= record.p80_ms
        if record.op == "floor":
            assert record.ratio is None and record.loss_error is None
            continue
        assert record.loss_error < 1e-6
        floor = "gemm4" if record.schedule == "recompute" else "gemm3"
        if record.mode == "forward":
            floor = max("gemm1", "read_weight", key=lambda name: floors[record.T, name])
        assert record.floor_ms == floors[record.T, floor]
        assert record.ratio == pytest.approx(record.p50_ms / record.floor_ms)
        assert (record.dhidden_error is None) == (record.mode == "forward")
        if record.mode == "forward_backward":
            assert 0 < record.dhidden_error < 1e-5 and 0 < record.dweight_error < 1e-5
            assert 0 < record.workspace_mib < record.peak_mib
    printed = capsys.readouterr().out
    assert "T=48 H=32 V=1000 fp32" in printed and "eager in_forward" in printed
    assert "error" not in printed  # a peer that is not installed is none

    with (tmp_path / "out" / "found.v1.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["impl"] for row in rows] == [record.impl for record in found]
    assert list(rows[0]) == FIELDS and float(rows[-3]["ratio"]) == found[-3].ratio


def test_reading_the_weight_is_the_floor_where_it_takes_longer(tmp_path, monkeypatch):
    slow = replace(FLOORS["read_weight"], make=lambda hidden, weight: lambda: time.sleep(0.01))
    monkeypatch.setitem(FLOORS, "read_weight", slow)
    assert run(tmp_path, "  - {impl: read_weight}\n  - {impl: eager, mode: forward}\n") == 0
    assert all(record.floor_ms >= 10 for record in records(tmp_path, "eager"))


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x``, whose gradient is scaled."""
    return x.detach() + factor * (x - x.detach())


def raising_after(good_calls: int):
    calls = itertools.count()

    def raises(*operands, **options):
        if next(calls) >= good_calls:
            raise torch.OutOfMemoryError("no memory for [logits]\nwith a long explanation")
        return canonical(*operands)

    return raises


def test_each_run_is_judged_by_itself(tmp_path, monkeypatch, capsys):
    """A wrong one keeps its times, one that raises has its message; torch_eager sets a budget."""
    no_memory = "OutOfMemoryError: no memory for [logits]"
    judged = {
        "nan": (lambda *operands: canonical(*operands) * float("nan"), "wrong: loss is off by"),
        "zero": (lambda h, w, y: canonical(scaled(h, 0.0), w, y), "wrong: dhidden is off by"),
        "dweight": (lambda h, w, y: canonical(h, scaled(w, 1.05), y), "wrong: dweight is off by"),
        "slightly": (lambda h, w, y: canonical(scaled(h, 1.01), w, y), "ok: "),
        "at_once": (raising_after(0), f"error: {no_memory}"),
        "later": (raising_after(6), f"error: {no_memory}"),
    }
    for name, (loss_of, _) in judged.items():
        peer(monkeypatch, loss_of, name)
    runs = "".join(f"  - {{impl: {name}}}\n" for name in judged) + EAGER
    assert run(tmp_path, runs) == 0
    printed = capsys.readouterr().out
    for record in records(tmp_path):
        _, expected = judged.get(record.impl, (None, "ok: "))
        assert f"{record.status}: {record.message or ''}".startswith(expected)
        assert (record.p50_ms is None) == (record.status == "error") == (expected[:5] == "error")
        assert record.status != "error" or record.loss_error is None
        assert record.status == "ok" or expected in printed
    assert "NaN" not in (tmp_path / "out" / "found.v1.json").read_text()

    runs = "  - {impl: slightly}\n  - {impl: torch_eager}\n"
    assert run(tmp_path, runs, "--fresh") == 0
    assert {record.status for record in records(tmp_path, "slightly")} == {"wrong"}
    assert {record.status for record in records(tmp_path, "torch_eager")} == {"ok"}


def test_a_yardstick_that_is_wrong_itself_excuses_nothing(tmp_path, monkeypatch):
    """Gradients of zeros are off by 1, which is less than three times that."""
    for name in ("zero", "torch_eager"):
        peer(monkeypatch, lambda h, w, y: canonical(scaled(h, 0.0), w, y), name)
    assert run(tmp_path, "  - {impl: zero}\n  - {impl: torch_eager}\n") == 0
    for record in records(tmp_path, "zero") + records(tmp_path, "torch_eager"):
        assert record.status == "wrong" and record.message.startswith("dhidden is off by 1.0e+00")


@pytest.mark.parametrize(("fault", "said"), [
    (lambda h, w, y, **_: canonical(scaled(h, 0.9), w, y), "wrong: eager cached at {}: dhidden is"),
    (raising_after(0), "error: eager cached at {}: OutOfMemoryError: no memory"),
    (raising_after(6), "error: eager cached at {}: OutOfMemoryError: no memory"),
])  # fmt: skip
def test_a_run_of_ours_that_is_wrong_or_fails_is_a_failure(
    tmp_path, monkeypatch, capsys, fault, said
):
    """Also where the shape was measured before; a peer's is a result."""
    monkeypatch.setattr(loss_functions, "linear_cross_entropy", fault)
    peer(monkeypatch, raising_after(0))
    runs = EAGER + "  - {impl: canonical}\n"
    for _ in range(2):
        assert run(tmp_path, runs) == 1
        printed = capsys.readouterr().out.splitlines()
        for T in (24, 12):
            assert sum(x.startswith(said.format(f"T={T} H=16 V=64 fp32")) for x in printed) <= 1
        assert any(x.startswith(said.format("T=24 H=16 V=64 fp32")) for x in printed)
        assert not any(x.startswith(("error: canonical", "wrong: canonical")) for x in printed)
    assert {record.status for record in records(tmp_path, "canonical")} == {"error"}


def test_what_cannot_be_measured_here_is_said_before_anything_is(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "start", lambda *args: pytest.fail("begun"))
    with pytest.raises(ConfigError, match=r"^cuda_graph needs a GPU, got device=cpu$"):
        run(tmp_path, EAGER, "--device", "auto", "--cuda-graph")
    for suffix, options in ((".csv", []), (".profile.json", ["--profile"])):
        path = tmp_path / "out" / f"found.v1{suffix}"
        path.mkdir(parents=True)
        with pytest.raises(RunError, match=rf"cannot write {path}: Is a directory$"):
            run(tmp_path, EAGER, *options)
        path.rmdir()


def test_a_loss_in_half_precision_may_be_rounded(tmp_path):
    runs = "  - {impl: torch_eager}\n"
    assert run(tmp_path, runs, "--shapes.0.dtype", "bf16", "--shapes.1.dtype", "bf16") == 0
    assert {record.status for record in records(tmp_path)} == {"ok"}


def test_a_loss_of_0_is_right_and_nothing_else(tmp_path, monkeypatch):
    """No token counts, in the other shape there is one entry; PyTorch's mean of none is NaN."""
    peer(monkeypatch, lambda *operands: 1 + 0 * canonical(*operands), "one")
    runs = EAGER + "  - {impl: eager, per_token: true}\n  - {impl: one}\n  - {impl: canonical}\n"
    shapes = ("--shapes.0.counted", "0.0", "--shapes.1.V", "1")
    assert run(tmp_path, runs, *shapes) == 0
    for r in records(tmp_path, "eager"):
        assert r.status == "ok" and r.loss_error == 0, r.message
    assert {r.status for r in records(tmp_path, "one")} == {"wrong"}
    assert [r.status for r in records(tmp_path, "canonical")] == ["wrong", "ok"]


def test_two_ranks_end_to_end(tmp_path):
    """Peers of one rank are skipped, among them those of divergences."""
    runs = EAGER + (
        "  - {impl: eager, schedule: recompute, sequence_parallel: true}\n  - {impl: canonical}\n"
        "  - {impl: gathered_weight, sequence_parallel: true}\n"
        "  - {impl: divergence_with_logits, divergence: jsd}\n"
    )
    command = torchrun("-m", "flce_dist.launch.bench", *arguments(tmp_path, runs), "--trace")
    with started(command, tmp_path, forks=True) as running:
        statuses, (output,) = running.finish()
    assert statuses == [0], output
    assert output.count("T=24 H=16 V=64 fp32 on 2 ranks") == 1  # rank 0 alone prints
    assert json.loads((tmp_path / "out" / "found.v1.json").read_text())["about"]["ranks"] == 2
    profiles = json.loads((tmp_path / "out" / "found.v1.profile.json").read_text())["profiles"]
    assert {"eager cached", "eager recompute SP"} <= {profile["run"] for profile in profiles}
    assert len(list((tmp_path / "out").glob("*.trace.json.gz"))) == len(profiles)
    ours = records(tmp_path, "eager")
    assert [record.sequence_parallel for record in ours] == [False, True] * 2
    for record in (*ours, *records(tmp_path, "gathered_weight")):
        assert record.P == 2 and record.status == "ok" and record.ratio > 0
        assert record.loss_error < 1e-6 and record.dhidden_error < 1e-5 > record.dweight_error
    of_one_rank = records(tmp_path, "canonical") + records(tmp_path, "divergence_with_logits")
    for record in of_one_rank:
        assert record.status == "skipped" and record.p50_ms is None
        assert record.message == "it does not split the vocabulary over ranks"
    assert output.count(f"skipped: {record.message}") == len(of_one_rank) == 4
    assert "error" not in output


@on_ranks(1)
def test_one_rank_of_torchrun_is_compared_as_a_process_alone(group, tmp_path):
    assert run(tmp_path, "  - {impl: divergence_with_logits, divergence: jsd}\n") == 0
    for record in records(tmp_path, "divergence_with_logits"):
        assert record.status == "ok" and None not in (record.loss_error, record.dweight_error)


def test_an_ended_benchmark_goes_on_after_the_last_whole_shape(tmp_path, monkeypatch, capsys):
    """The other shape differs from it in how many tokens count alone."""
    measure, measured = bench._bench_shape, []
    shapes = ("--shapes.1.T", "24", "--shapes.1.counted", "0.5")

    def ends_at_the_second(config, shape, *args):
        measured.append(shape.counted)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(config, shape, *args)

    monkeypatch.setattr(bench, "_bench_shape", ends_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, EAGER, *shapes)
    assert "without --fresh the same command goes on" in capsys.readouterr().out
    first = records(tmp_path)
    assert {record.counted for record in first} == {1.0}

    assert run(tmp_path, EAGER, *shapes) == 0
    assert measured == [1.0, 0.5, 0.5]
    assert "T=24 H=16 V=64 fp32: measured before" in capsys.readouterr().out
    assert records(tmp_path)[: len(first)] == first
    assert {record.counted for record in records(tmp_path)} == {1.0, 0.5}

    with pytest.raises(ConfigError, match=r"config\.rounds is 2 there and 3 here.*--fresh"):
        run(tmp_path, EAGER, *shapes, "--rounds", "3")
    about = bench.about
    monkeypatch.setattr(bench, "about", lambda device: {**about(device), "commit": "other"})
    with pytest.raises(ConfigError, match="commit is "):
        run(tmp_path, EAGER, *shapes)
    assert run(tmp_path, EAGER, *shapes, "--rounds", "3", "--fresh") == 0
    assert measured[3:] == [1.0, 0.5]


def test_a_peer_that_is_not_installed_is_no_error_in_the_table(tmp_path, monkeypatch, capsys):
    def absent(tp_group: object) -> Any:
        raise ModuleNotFoundError("No module named 'kernel'", name="kernel")

    monkeypatch.setitem(PEERS, "liger", Peer(absent, "liger-kernel"))
    assert run(tmp_path, "  - {impl: liger}\n") == 0
    found = records(tmp_path, "liger")
    assert found and {record.status for record in found} == {"skipped"}
    printed = capsys.readouterr().out
    assert "skipped: liger-kernel is not installed:" in printed
    assert "error" not in printed and "Skipped" not in printed


@pytest.mark.parametrize("text", [
    "{", "[]", '{"about": {}}', '{"about": {}, "records": [{}]}', "[" * 100_000,
    '{"about": [], "records": []}', '{"about": {"peers": 1}, "records": []}',
])  # fmt: skip
def test_something_else_is_not_overwritten(tmp_path, text):
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "found.v1.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="must be a result file of the benchmark"):
        run(tmp_path)
    assert path.read_text() == text
