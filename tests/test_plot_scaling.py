"""Figures over the number of ranks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from flce_dist.launch.bench.files import write_results
from flce_dist.launch.plot import __main__ as plot
from flce_dist.launch.plot.scaling import efficiency, scaling
from flce_dist.launch.yaml_config import ConfigError
from tests.figures import ABOUT, GRADIENTS, assert_readable, drawn, record, texts

OVER_RANKS = [
    record(impl, ms, P=P, workspace_mib=mib, **fields)
    for impl, fields, times, mib in (
        ("gemm3", {}, (40.0, 20.0, 10.0), None),
        ("megatron_fused", {"sequence_parallel": True}, (60.0, 33.0, 20.0), 900.0),
        ("triton", {"schedule": "cached", "sequence_parallel": True}, (40.0, 25.0, 12.5), 200.0),
        ("gemm4", {}, (50.0, 25.0, 12.5), None),
    )
    for P, ms in zip((1, 2, 4), times, strict=True)
]


def test_scaling_shows_time_and_memory_against_ranks() -> None:
    equal = [replace(r, impl="eager") for r in OVER_RANKS if r.impl == "triton"]
    figure = drawn(scaling([*OVER_RANKS, *equal]))
    times, memory_axes = figure.axes
    found = {line.get_label(): np.asarray(line.get_xdata()).tolist() for line in times.lines}
    rows = [label.get_text() for label in times.get_yticklabels()]
    assert rows == ["gemm3", "triton cached SP", "eager cached SP", "megatron_fused SP"]
    assert found["1 rank"] == [1.0, 1.0, 1.0, 1.5]
    assert found["4 ranks"] == [1.0, 1.25, 1.25, 2.0]
    assert texts(figure) == ["100%, 100%", "80%, 80%", "80%, 80%", "91%, 75%"]
    of_memory = [line for line in memory_axes.lines if line.get_marker() != "None"]
    assert [np.asarray(line.get_xdata()).tolist() for line in of_memory] == [
        [200.0, 200.0, 900.0]
    ] * 3
    assert_readable(figure)
    for axes in figure.axes:
        markers = [line for line in axes.lines if line.get_marker() != "None"]
        places = np.concatenate([axes.transData.transform(line.get_xydata()) for line in markers])
        gaps = np.linalg.norm(places[:, None] - places, axis=-1) + 1e9 * np.eye(len(places))
        largest = 2**0.5 * markers[0].get_markersize() * figure.dpi / 72  # a diamond
        assert gaps.min() > largest, "one covers another"


def test_scaling_needs_several_numbers_of_ranks() -> None:
    assert scaling([r for r in OVER_RANKS if r.P == 2]) is None
    assert scaling([]) is None
    failed = [replace(r, p50_ms=None, status="error") for r in OVER_RANKS if r.P > 1]
    assert scaling([r for r in OVER_RANKS if r.P == 1] + failed) is None
    two_and_four = {r.P: r for r in OVER_RANKS[1:3]}
    assert efficiency(two_and_four) == {4: 1.0}


def test_files_of_several_numbers_of_ranks_give_one_picture_of_scaling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "FIGURES", {})
    for name, P, fields in (
        ("first", 1, {}),
        ("second", 2, {}),
        ("fourth", 4, {"commit": "def5678"}),
        ("elsewhere", 4, {"hardware": "B"}),
    ):
        about = {**ABOUT, "ranks": P, **fields}
        write_results(tmp_path / name, about, [r for r in OVER_RANKS if r.P == P])
    write_results(tmp_path / "other", {**ABOUT, "commit": "0ld"}, GRADIENTS)

    def drawn_from(*names: str) -> list[str]:
        files = [tmp_path / f"{name}.json" for name in (*names, "elsewhere", "other")]
        return [path.name for path in plot.draw(files, tmp_path / "figures")]

    assert drawn_from("first") == [], "ranks of different hardware"
    got = "first.json of abc1234, second.json of abc1234, fourth.json of def5678"
    with pytest.raises(ConfigError, match=f"must be of one commit to be compared, got {got}"):
        drawn_from("first", "second", "fourth")
    assert not (tmp_path / "figures").exists()
    assert drawn_from("first", "second") == ["first-scaling.png"]
