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
    times_figure,
)
from flce_dist.launch.train.config import HeadConfig, RunConfig, flatten
from tests.figures import ABOUT, RESULTS, assert_readable, drawn, texts

EXACT, SEED, EPS12, EPS10, DROPPED = LABELS = [
    "exact", "exact, another seed", "filtered, 2^-12", "filtered, 2^-10", "dropped, 2^-12",
]  # fmt: skip


def made_up(shift: float, seed: int, shares: dict[str, float], **head: Any) -> dict[str, Any]:
    """A run of 2500 steps, in the form of ``launch.train.results``."""
    draw = random.Random(seed)

    def loss(step: float) -> float:
        return 3.4 + 8 * math.exp(-step / 250) + shift * step / 2500 + draw.gauss(0, 0.02)

    validations = range(250, 2501, 250)
    return {
        "config": flatten(RunConfig(head=HeadConfig(**head))),
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
        EPS10: made_up(
            -0.004, 4, {**ours, "kept_share": 0.14}, **filtered | {"filter_eps": 2.0**-10}
        ),
        DROPPED: made_up(0.1, 5, {"kept_share": 0.2, **dropped}, kind="dropped_tiles", **filtered),
    }


def records() -> list[dict[str, Any]]:
    return json.loads((RESULTS / "bench-filtered-h200.json").read_text())["records"]


def ys(axes: Axes, color: str, marker: str = "None") -> list[float]:
    """What the one line of a colour shows."""
    (line,) = (x for x in axes.lines if x.get_color() == color and x.get_marker() == marker)
    return np.asarray(line.get_ydata()).tolist()


def test_differences_are_from_the_first_exact_run() -> None:
    figure = drawn(filtered_figure(runs()))
    assert_readable(figure)
    _, kept, difference, _ = figure.axes
    assert np.mean(ys(difference, DROPPED_COLORS[0])[-20:]) == pytest.approx(0.1, abs=0.02)
    assert np.mean(ys(difference, FILTERED_COLORS[0])[-20:]) == pytest.approx(0.0, abs=0.02)
    assert ys(difference, DROPPED_COLORS[0], "o")[-1] == pytest.approx(0.1, abs=0.1)
    assert ys(kept, FILTERED_COLORS[1]) == pytest.approx([0.14] * 100)
    assert difference.get_title("left") == "Loss minus that of: exact"
    # Of the reference neither difference nor kept share is drawn.
    assert {line.get_color() for line in kept.lines} == {*FILTERED_COLORS[:2], DROPPED_COLORS[0]}


def test_a_dropped_run_far_away_does_not_flatten_the_others() -> None:
    found = runs()
    found[DROPPED] = made_up(30.0, 5, {"kept_share": 0.2, "dropped_mass": 0.05})
    difference = drawn(filtered_figure(found)).axes[2]
    assert difference.get_title("left") == "Loss minus that of: exact; dropped: beyond"
    low, high = difference.get_ylim()
    assert -0.2 < low < -0.02 and 0.2 < high < 1.5


def test_bands_lie_beside_the_spread_of_exact_runs() -> None:
    found = runs()
    for run in found.values():  # a band without labels
        run["by_frequency"]["tokens"][1] = 0
        run["by_frequency"]["loss"][-1][1] = None
    figure = drawn(filtered_figure(found))
    assert_readable(figure)
    bands = figure.axes[3]
    assert ys(bands, DROPPED_COLORS[0], "o") == pytest.approx([0.0, 0.2, 0.3, 0.5])
    heights = [bar.get_height() for bar in bands.patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([0.0, 0.0, 0.04, 0.06, 0.1])
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
    assert len(ys(figure.axes[2], EXACT_COLOR)) == 100


def test_runs_that_are_all_exact_have_no_such_figure() -> None:
    exact = {label: runs()[label] for label in (EXACT, SEED)}
    assert filtered_figure(exact) is None and overview(records(), exact) is None
    assert filtered_figure({DROPPED: runs()[DROPPED]}) is None


def test_files_of_both_kinds_give_an_overview(tmp_path: Path) -> None:
    trained, timed = tmp_path / "filtered.json", RESULTS / "bench-filtered-h200.json"
    trained.write_text(json.dumps({"about": ABOUT, "runs": runs()}))
    assert plot.main([str(trained), str(timed), "--out", str(tmp_path)]) == 0
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert names == {
        "filtered-training", "filtered-filtered", "filtered-overview", "bench-filtered-h200-time",
    }  # fmt: skip
