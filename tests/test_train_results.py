"""Several runs as one result file, and its figure."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from flce_dist.launch.plot import __main__ as plot
from flce_dist.launch.plot.training import training_figure
from flce_dist.launch.program import RunError
from flce_dist.launch.train import results
from flce_dist.launch.train.config import RunConfig, flatten
from tests.figures import ABOUT, assert_readable, texts

LABELS = ["linear_cross_entropy, cached", "linear_cross_entropy, in_forward", "Megatron, fused",
          "Megatron, unfused", "Megatron, fused, another seed"]  # fmt: skip


def leave_run(folder: Path, shift: float = 0.0, steps: int = 100, **about: Any) -> None:
    folder.mkdir()
    origin = {**ABOUT, "command": ["python", "x"], "config": flatten(RunConfig()), **about}
    (folder / "run.json").write_text(json.dumps(origin))
    records: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "loss": 3 + 8 * math.exp(-step / 30) + shift,
         "gradient_norm": 1.0, "step_ms": 200.0 if step > 20 else 9e3, "tokens_per_s": 1.6e5 + step,
         "peak_mib": 40_000.0 + step, "head_peak_mib": 1000.0}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    for step, loss in ((steps // 2, 4.0), (steps, 3.5)):
        bands = [
            {"from": 0, "tokens": 30, "loss": 2.0 + loss + shift},
            {"from": 256, "tokens": 0, "loss": None},
            {"from": 1024, "tokens": 2, "loss": 5.0 + loss - shift},
        ]
        validation = {"loss": loss + shift, "by_frequency": bands}
        records.append({"kind": "validation", "step": step, **validation})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def collect_runs(tmp_path: Path) -> Path:
    for i in range(len(LABELS)):
        leave_run(tmp_path / f"run{i}", shift=0.01 * i)
    out = tmp_path / "results" / "convergence.json"
    runs = [f"{label}={tmp_path / f'run{i}'}" for i, label in enumerate(LABELS)]
    assert results.main([str(out), *runs]) == 0
    return out


def test_runs_become_one_file_and_one_figure(tmp_path: Path) -> None:
    path = collect_runs(tmp_path)
    found = json.loads(path.read_text())
    assert found["about"] == ABOUT and list(found["runs"]) == LABELS
    run = found["runs"][LABELS[1]]
    assert run["command"] == "python x" and run["config"]["seed"] == 1234
    assert (run["step_ms"], run["tokens_per_s"], run["peak_mib"]) == (200.0, 160_060, 40_100)
    assert len(run["loss"]) == 100 and run["validation"] == [[50, 4.01], [100, 3.51]]
    assert run["steps_per_point"] == 1
    assert run["by_frequency"] == {
        "from": [0, 256, 1024],
        "tokens": [30, 0, 2],
        "loss": [[6.01, None, 8.99], [5.51, None, 8.49]],
    }
    assert len(path.read_text().splitlines()) < 400, "a list of numbers takes one line"
    assert plot.main([str(path), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "convergence-training.png").stat().st_size > 10_000


def test_the_figure_is_readable_and_shows_differences_from_megatron(tmp_path: Path) -> None:
    found = json.loads(collect_runs(tmp_path).read_text())
    figure = training_figure(found["runs"])
    assert_readable(figure)
    difference = figure.axes[1]
    assert difference.get_title("left") == "Difference from: Megatron, fused"
    lines = [line for line in difference.lines if line.get_color() != "black"]
    means = [float(np.asarray(line.get_xydata())[:, 1].mean()) for line in lines]
    assert means == pytest.approx([-0.02, -0.01, 0.01, 0.02], abs=1e-3)
    assert texts(figure, 3) == ["40,100"] * len(LABELS)


def test_runs_that_do_not_compare_are_refused(tmp_path: Path) -> None:
    leave_run(tmp_path / "a")
    leave_run(tmp_path / "b", commit="another")
    leave_run(tmp_path / "c", steps=10)
    out = str(tmp_path / "out.json")
    for runs, message in (
        ([f"a={tmp_path}/a", f"b={tmp_path}/b"], "must share commit; b and a do not"),
        ([f"c={tmp_path}/c"], "more than 20 steps, got 10"),
        ([f"a={tmp_path}/none"], "none must be the folder of a run"),
        (["a"], "must be LABEL=FOLDER"),
        ([f"a={tmp_path}/a", f"a={tmp_path}/b"], "labels of their own"),
    ):
        with pytest.raises(RunError, match=message):
            results.main([out, *runs])
    assert not Path(out).exists()


def test_what_a_run_approximates_is_in_the_file(tmp_path: Path) -> None:
    for name in ("exact", "filtered"):
        leave_run(tmp_path / name)
    path = tmp_path / "filtered" / "metrics.jsonl"
    shares = {"kept_share": 0.25, "rank_one_mass": 0.1}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**r, **shares}) + "\n" for r in lines))
    runs = results.collect({name: tmp_path / name for name in ("exact", "filtered")})["runs"]
    assert runs["filtered"]["kept_share"] == [0.25] * 100
    assert runs["filtered"]["rank_one_mass"] == [0.1] * 100
    assert not shares.keys() & runs["exact"].keys()


def test_long_curves_are_thinned_to_means(tmp_path: Path) -> None:
    leave_run(tmp_path / "long", steps=2503)
    path = tmp_path / "long" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    lines[7]["loss"] = None  # as of a step that was not finite
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = results.collect({"long": tmp_path / "long"})["runs"]["long"]
    assert run["steps_per_point"] == 5 and len(run["loss"]) == len(run["gradient_norm"]) == 501
    assert run["loss"][0] == pytest.approx(sum(losses[:5]) / 5, abs=1e-4)
    assert run["loss"][1] is None
    assert run["loss"][-1] == pytest.approx(sum(losses[-3:]) / 3, abs=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"by_frequency"', '"other"', "metrics.jsonl lacks 'by_frequency'"),
        ('{"kind"', '{"kin', "the folder of a run: Expecting"),
    ],
)
def test_records_of_another_version_or_cut_short_are_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    leave_run(tmp_path / "other")
    path = tmp_path / "other" / "metrics.jsonl"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(RunError, match=f"other must be .*{message}"):
        results.collect({"other": tmp_path / "other"})
