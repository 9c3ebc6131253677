"""The figure of branches of a training run, from made-up losses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer

from flce_dist.launch.plot import __main__ as plot
from flce_dist.launch.plot.branches import EXACT_COLORS, branches_figure
from flce_dist.launch.plot.filtered_runs import DROPPED_COLORS, FILTERED_COLORS
from flce_dist.launch.train.config import RunConfig, flatten
from tests.figures import ABOUT, assert_readable, drawn

SHIFTS = {
    "exact": 0.0,
    "filtered, 2^-12": 0.002,
    "filtered, 2^-10": 0.006,
    "exact, again": -0.001,
    "exact, recomputed": 0.0005,
    "dropped, 2^-12": 0.1,
}
STEPS = [100, 200, 300, 400]


def made_up(**changes: Any) -> dict[str, Any]:
    """The content of a file of three stretches, of which the last was interrupted."""
    branches = [
        {
            "stretch": stretch,
            "head": head,
            "steps": STEPS,
            "validation": [
                4.0 - 0.1 * stretch + shift * (1 + 0.1 * stretch) * step / 400 for step in STEPS
            ],
            "training": [4.0] * 4,
            "by_frequency": [
                {"from": 0, "tokens": 90, "loss": 3.0 + shift},
                {"from": 256, "tokens": 10, "loss": 9.0 - shift * (9 + stretch)},
            ],
            "shares": {},
            "seconds": 20.0,
        }
        for stretch in range(3)
        for head, shift in SHIFTS.items()
    ]
    about = {**ABOUT, "config": flatten(RunConfig()), "step": 1600}
    return {"about": about, "branches": branches[:-1], "differences": [], **changes}


def means(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """The means and the lengths of bars above them by label."""
    found = {}
    for drawn_head in axes.containers:
        assert isinstance(drawn_head, ErrorbarContainer)
        points, _, (bars,) = drawn_head.lines
        assert points is not None
        ys = np.asarray(points.get_ydata()).tolist()
        tops = [float(bar[1][1]) for bar in bars.get_segments()]
        errors = [top - y for top, y in zip(tops, ys, strict=True)]
        found[str(drawn_head.get_label())] = ys, errors
    return found


def test_means_have_bars_and_stretches_thin_lines() -> None:
    figure = drawn(branches_figure(made_up()))
    assert_readable(figure)
    both, near, bands = figure.axes
    assert list(means(both)) == list(SHIFTS)[1:]
    assert list(means(near)) == list(SHIFTS)[1:-1]
    ys, errors = means(near)["filtered, 2^-12"]
    assert ys == pytest.approx([0.00055, 0.0011, 0.00165, 0.0022])
    assert errors[-1] == pytest.approx(0.0002 / 3**0.5)
    colors = (*FILTERED_COLORS[:2], *EXACT_COLORS, DROPPED_COLORS[0])
    thin = [[x for x in both.lines if x.get_color() == c and x.get_alpha()] for c in colors]
    assert [len(lines) for lines in thin] == [3, 3, 3, 3, 2]
    assert np.asarray(thin[1][2].get_ydata())[[0, -1]].tolist() == pytest.approx([0.0, 0.0072])
    legend = both.get_legend()
    assert legend is not None and len(legend.get_texts()) == 5
    assert "mean and standard error of 2 to 3 stretches" in both.get_xlabel()
    assert "mean and standard error of 3 stretches" in near.get_xlabel()
    assert both.get_ylim()[1] > 0.1 and near.get_ylim()[1] < 0.01
    assert list(means(bands)) == list(SHIFTS)[1:-1]
    ys, errors = means(bands)["filtered, 2^-12"]
    assert ys == pytest.approx([0.002, -0.02]) and errors == pytest.approx([0.0, 0.002 / 3**0.5])
    assert [x.get_text() for x in bands.get_xticklabels()] == ["0\nto 255\n90 %", "from\n256\n10 %"]


def test_without_dropped_tiles_steps_have_one_panel() -> None:
    without = [x for x in made_up()["branches"] if not x["head"].startswith("dropped")]
    figure = drawn(branches_figure(made_up(branches=without)))
    assert_readable(figure)
    assert len(figure.axes) == 2
    alone = [x for x in made_up()["branches"] if x["head"] in ("exact", "dropped, 2^-12")]
    assert len(drawn(branches_figure(made_up(branches=alone))).axes) == 2


def test_one_stretch_has_no_bars_and_none_no_figure() -> None:
    one = [x for x in made_up()["branches"] if x["stretch"] == 0]
    ys, errors = means(drawn(branches_figure(made_up(branches=one))).axes[0])["exact, again"]
    assert ys[-1] == pytest.approx(-0.001) and errors == [0.0] * 4
    assert branches_figure(made_up(branches=one[:1])) is None
    assert branches_figure(made_up(branches=one[1:])) is None


def test_a_file_gives_the_figure(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps(made_up()))
    assert plot.main([str(path), "--out", str(tmp_path)]) == 0
    assert [x.name for x in tmp_path.glob("*.png")] == ["found-difference.png"]
