"""Figures of runs with filtered gradients beside exact ones, from made-up numbers."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from matplotlib.axes import Axes

from flce_dist.launch.plot import __main__ as plot
from flce_dist.launch.plot.filtered_runs import (
    DROPPED_COLORS,
    EXACT_COLOR,
    FILTERED_COLORS,
    filtered_figure,
    overview,
)
from flce_dist.launch.plot.filtered_times import times_figure
from flce_dist.launch.train.config import HeadConfig, RunConfig, flatten
from tests.figures import ABOUT, RESULTS, assert_readable, drawn, texts

EXACT, SEED, EPS12, EPS12_SEED, EPS10, DROPPED = (
    "exact", "exact, another seed", "filtered, 2^-12", "filtered, 2^-12, another seed",
    "filtered, 2^-10", "dropped, 2^-12",
)  # fmt: skip


def made_up(shift: float, seed: int, shares: dict[str, float], **head: Any) -> dict[str, Any]:
    """A run of 2500 steps, in the form of ``launch.train.results``."""
    draw = random.Random(seed)

    def loss(step: float) -> float:
        return 3.4 + 8 * math.exp(-step / 250) + shift * step / 2500 + draw.gauss(0, 0.02)

    validations = range(250, 2501, 250)
    return {
        "config": flatten(RunConfig(seed=seed, head=HeadConfig(**head))),
        "tokens_per_s": 150_000,
        "peak_mib": 20_000,
        "steps_per_point": 5,
        "loss": [round(loss(step), 4) for step in range(3, 2501, 5)],
        "validation": [[step, round(loss(step), 5)] for step in validations],
        "by_frequency": {
            "from": [0, 256, 1024, 4096, 16384],
            "tokens": [140_000, 50_000, 40_000, 26_000, 6_144],
            "loss": [
                [2.0, 4.0 + shift, 5.0 + 2 * shift, 7.0 + 3 * shift, 11.0 + 5 * shift]
                for _ in validations
            ],
        },
        **{name: [value] * 500 for name, value in shares.items()},
    }


def runs() -> dict[str, dict[str, Any]]:
    ours, dropped = {"kept_share": 0.2, "rank_one_mass": 0.05}, {"dropped_mass": 0.05}
    filtered = {"filter_eps": 2.0**-12, "vocab_order": True}
    return {
        EXACT: made_up(0.0, 1, {}),
        SEED: made_up(0.01, 2, {}),
        EPS12: made_up(0.003, 3, ours, **filtered),
        EPS12_SEED: made_up(0.013, 6, ours, **filtered),
        EPS10: made_up(
            -0.004, 4, {**ours, "kept_share": 0.14}, **filtered | {"filter_eps": 2.0**-10}
        ),
        DROPPED: made_up(0.1, 5, {"kept_share": 0.2, **dropped}, kind="dropped_tiles", **filtered),
    }


def records() -> list[dict[str, Any]]:
    return json.loads((RESULTS / "bench-filtered-h200.json").read_text())["records"]


def ys(axes: Axes, color: str, marker: str = "None") -> list[list[float]]:
    """What the lines of a colour show."""
    lines = (x for x in axes.lines if x.get_color() == color and x.get_marker() == marker)
    return [np.asarray(line.get_ydata()).tolist() for line in lines]


def test_runs_of_one_head_share_a_colour_and_an_entry_of_the_legend() -> None:
    figure = drawn(filtered_figure(runs()))
    assert_readable(figure)
    loss, kept, difference, _ = figure.axes
    legend = loss.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "exact (2 seeds)", "filtered, 2^-12 (2 seeds)", "filtered, 2^-10", "dropped, 2^-12",
    ]  # fmt: skip
    colors = (EXACT_COLOR, *FILTERED_COLORS[:2], DROPPED_COLORS[0])
    assert [len(ys(loss, color)) for color in colors] == [2, 2, 1, 1]
    assert [len(ys(kept, color)) for color in colors] == [0, 2, 1, 1]
    assert [len(ys(difference, color)) for color in colors[1:]] == [2, 1, 1]
    assert ys(kept, FILTERED_COLORS[1])[0] == pytest.approx([0.14] * 100)
    one_seed = runs()
    for label in (EPS12, EPS12_SEED):
        one_seed[label]["config"]["seed"] = 3
    legend = drawn(filtered_figure(one_seed)).axes[0].get_legend()
    assert legend is not None and legend.get_texts()[1].get_text() == "filtered, 2^-12 (2 runs)"


def test_differences_are_from_the_mean_of_the_exact_runs() -> None:
    found = runs()
    for label, loss in ((EXACT, 4.0), (SEED, 4.2), (EPS12, 4.3), (EPS10, 3.9)):
        found[label]["loss"] = [loss] * 500
        found[label]["validation"] = [[step, loss] for step in (1000, 2000)]
    found[SEED]["loss"] = found[SEED]["loss"][:400]  # the mean ends where one of them ends
    difference = drawn(filtered_figure(found)).axes[2]
    gaps, _ = ys(difference, FILTERED_COLORS[0])
    assert gaps == pytest.approx([0.2] * 80)
    assert ys(difference, FILTERED_COLORS[1]) == [pytest.approx([-0.2] * 80)]
    assert ys(difference, FILTERED_COLORS[1], "o") == [pytest.approx([-0.2] * 2)]
    assert ys(difference, EXACT_COLOR, "o") == [pytest.approx([x] * 2) for x in (-0.1, 0.1)]
    (gray,) = difference.collections
    assert np.asarray(gray.get_paths()[0].get_extents().intervaly) == pytest.approx([-0.1, 0.1])
    assert difference.get_title("left") == "Loss minus the mean of 2 exact runs"
    del found[SEED]
    difference = drawn(filtered_figure(found)).axes[2]
    assert ys(difference, FILTERED_COLORS[1]) == [pytest.approx([-0.1] * 100)]
    assert difference.get_title("left") == "Loss minus that of the exact run"


def test_a_dropped_run_far_away_does_not_flatten_the_others() -> None:
    found = runs()
    found[DROPPED] = found[DROPPED] | {"loss": made_up(30.0, 5, {})["loss"]}
    difference = drawn(filtered_figure(found)).axes[2]
    assert difference.get_title("left") == "Loss minus the mean of 2 exact runs; dropped: beyond"
    low, high = difference.get_ylim()
    assert -0.2 < low < -0.02 and 0.2 < high < 1.5


def test_bands_lie_beside_the_range_of_exact_runs() -> None:
    found = runs()
    for run in found.values():  # a band without labels
        run["by_frequency"]["tokens"][1] = 0
        run["by_frequency"]["loss"][-1][1] = None
    figure = drawn(filtered_figure(found))
    assert_readable(figure)
    bands = figure.axes[3]
    # Exact runs lie shift 0 and 0.01 apart, so their mean is at half of that.
    assert ys(bands, DROPPED_COLORS[0], "o") == [pytest.approx([0.0, 0.19, 0.285, 0.475])]
    assert ys(bands, DROPPED_COLORS[0], "_") == []
    assert ys(bands, FILTERED_COLORS[0], "o") == [pytest.approx([0.0, 0.006, 0.009, 0.015])]
    seeds = [[0.0, -0.004, -0.006, -0.01], [0.0, 0.016, 0.024, 0.04]]
    assert ys(bands, FILTERED_COLORS[0], "_") == [pytest.approx(x) for x in seeds]
    bars = [(x.get_y(), x.get_height()) for x in bands.patches]  # type: ignore[attr-defined]
    spreads = [0.0, 0.02, 0.03, 0.05]
    assert bars == [pytest.approx((-spread / 2, spread)) for spread in spreads]
    names = [label.get_text() for label in bands.get_xticklabels()]
    assert names[0] == "0\nto 255\n66 %" and names[-1] == "from\n16,384\n3 %"
    without = {label: run for label, run in runs().items() if label != SEED}
    assert "gray" in bands.get_xlabel()
    assert "gray" not in drawn(filtered_figure(without)).axes[3].get_xlabel()


def test_the_overview_has_times_and_curves() -> None:
    figure = drawn(overview(records(), runs()))
    assert_readable(figure)
    ratios = [record["ratio"] for record in records()[:6] if record["impl"] == "triton"]
    assert len(ratios) == 4  # recompute, cached and two of filter_eps, of the whole vocabulary
    assert texts(figure) == [f"{ratio:.2f}" for ratio in ratios]
    times = figure.axes[0]
    names = [label.get_text() for label in times.get_yticklabels()]
    assert names == ["recompute", "cached", "filtered,\n2^-12", "filtered,\n2^-10"]
    assert_readable(times_figure(records()))
    assert [len(gaps) for gaps in ys(figure.axes[2], FILTERED_COLORS[0])] == [100, 100]


def test_runs_that_are_all_exact_have_no_such_figure() -> None:
    exact = {label: runs()[label] for label in (EXACT, SEED)}
    assert filtered_figure(exact) is None and overview(records(), exact) is None
    assert filtered_figure({DROPPED: runs()[DROPPED]}) is None


def test_records_without_times_have_no_such_figure() -> None:
    without = [record | {"ratio": None} for record in records()]
    assert times_figure(without) is None and overview(without, runs()) is None


def test_files_of_both_kinds_give_an_overview(tmp_path: Path) -> None:
    trained, timed = tmp_path / "filtered.json", RESULTS / "bench-filtered-h200.json"
    trained.write_text(json.dumps({"about": ABOUT, "runs": runs()}))
    assert plot.main([str(trained), str(timed), "--out", str(tmp_path)]) == 0
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert names == {
        "filtered-training", "filtered-filtered", "filtered-overview", "bench-filtered-h200-time",
    }  # fmt: skip
