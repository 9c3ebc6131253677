"""Figures of profiles."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from flce_dist.launch.bench.files import write_profiles, write_results
from flce_dist.launch.bench.profiles import Activity, Profile, profile_of
from flce_dist.launch.plot import __main__ as plot
from flce_dist.launch.plot.profiles import ProfiledRun, timeline
from flce_dist.launch.yaml_config import ConfigError
from tests.figures import ABOUT, drawn

STEP = [
    Activity("ncclDevKernel_AllGather_RING_LL", 0.0, 2e3),
    Activity("nvjet_tst_128x256", 2e3, 9e3),
    Activity("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 5e3, 10e3),
    Activity("vectorized_elementwise_kernel", 11e3, 12e3),
]


PROFILED = [
    ProfiledRun("T=8", "gemm3", profile_of(STEP[1:2], 1)),
    ProfiledRun("T=8", "triton cached SP", profile_of(STEP, 1)),
    ProfiledRun("T=16", "triton cached SP", profile_of(STEP[:2], 1)),
    ProfiledRun("T=8", "on a CPU", Profile(())),
]


def bars(figure: Figure | None, panel: int) -> list[tuple[float, float]]:
    """Left end and width of each bar."""
    patches: Any = drawn(figure).axes[panel].patches
    return [(round(p.get_x(), 6), round(p.get_width(), 6)) for p in patches]


def test_the_timeline_has_communication_in_a_row_of_its_own() -> None:
    figure = drawn(timeline(PROFILED))
    patches: Any = drawn(figure).axes[0].patches
    assert bars(figure, 0)[:4] == [(0, 2), (2, 7), (5, 5), (11, 1)]
    rows = [patch.get_y() + patch.get_height() / 2 for patch in patches[:4]]
    assert rows == pytest.approx([0.2, -0.2, 0.2, -0.2])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["triton cached SP"], "a floor is its products"
    assert patches[2].get_edgecolor() == patches[2].get_facecolor(), "seen where it is short"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "matrix products", "other kernels", "communication",
    ]  # fmt: skip
    assert timeline(PROFILED[3:]) is None and timeline([]) is None


def test_a_profile_gives_its_pictures(tmp_path: Path) -> None:
    size = {"T": 8, "H": 4, "V": 16, "dtype": "bf16"}
    profiles = {x.run: x.profile for x in PROFILED if x.shape == "T=8"}
    write_profiles(tmp_path / "tp", {**ABOUT, "ranks": 4}, size, profiles)
    figures = tmp_path / "figures"
    assert plot.main([str(tmp_path / "tp.profile.json"), "--out", str(figures)]) == 0
    assert {path.name for path in figures.iterdir()} == {"tp-timeline.png"}
    _, read = plot.read_profiles(tmp_path / "tp.profile.json")
    assert [(shape, run) for shape, run, _ in read] == [
        ("T=8, H=4, V=16, bf16", run) for run in profiles
    ]
    assert [profile for *_, profile in read] == list(profiles.values())
    write_results(tmp_path / "other.profile", ABOUT, [])
    with pytest.raises(ConfigError, match="must be a profile of the benchmark"):
        plot.main([str(tmp_path / "other.profile.json")])
