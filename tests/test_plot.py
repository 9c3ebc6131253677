"""Figures of benchmark records: what they say, and that nothing in them overlaps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from flce_dist.launch.bench.files import write_results
from flce_dist.launch.plot import __main__ as plot
from flce_dist.launch.plot.bars import memory
from flce_dist.launch.plot.dial import dial
from flce_dist.launch.yaml_config import ConfigError
from tests.figures import ABOUT, GRADIENTS, MIB, assert_readable, drawn, record, texts

DIAL = [
    record("gemm3", 10.0),
    record("triton", 14.0, schedule="recompute"),
    record("triton", 13.0, schedule="auto", max_logits_bytes=64 * MIB),
    record("triton", 12.0, schedule="auto", max_logits_bytes=128 * MIB),
    record("triton", 11.0, schedule="cached"),
]


def test_each_file_gives_the_pictures_that_it_has_records_for(tmp_path: Path, capsys) -> None:
    for name, found in (("peers", GRADIENTS), ("dial", DIAL), ("none", [])):
        write_results(tmp_path / name, ABOUT, found)
    files = [str(tmp_path / f"{name}.json") for name in ("peers", "dial", "none")]
    assert plot.main([*files, "--out", str(tmp_path / "figures")]) == 0
    expected = {"peers-memory", "dial-memory", "dial-dial"}
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == expected
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "figures").iterdir())
    assert str(tmp_path / "figures" / "dial-dial.png") in capsys.readouterr().out


def test_memory_names_what_is_wrong_or_failed() -> None:
    found = [replace(r, workspace_mib=None) if r.status == "error" else r for r in GRADIENTS]
    figure = drawn(memory(found))
    bars = [bar for bar in figure.axes[0].patches if bar.get_width() > 0]  # type: ignore[attr-defined]
    assert [bar.get_width() for bar in bars] == [1.0, 100.0, 100.0]  # type: ignore[attr-defined]
    assert [bar.get_hatch() is not None for bar in bars] == [False, False, True]
    assert bars[0].get_facecolor() != bars[1].get_facecolor() == bars[2].get_facecolor()
    shown = texts(figure)
    assert shown == ["0", "100", "100, wrong dweight", "OutOfMemoryError: CUDA out"]
    assert all(x.get_bbox_patch() for x in figure.axes[0].texts), "lines run behind them"
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["triton cached", "canonical", "cce", "cce_exact"]


def test_shapes_have_panels_with_one_axis() -> None:
    figure = drawn(memory(GRADIENTS + [replace(r, T=16) for r in GRADIENTS[:3]]))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "T=8, H=16, V=64, bf16",
        "T=16, H=16, V=64, bf16",
    ]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


def test_memory_has_a_place_for_nothing() -> None:
    figure = drawn(memory(GRADIENTS))
    assert figure.axes[0].get_xscale() == "log"
    assert texts(figure)[:2] == ["0", "100"]
    assert figure.axes[-1].get_xlabel().endswith("\nnot installed: liger")
    assert_readable(figure)


def test_the_dial_runs_from_recompute_to_cached() -> None:
    figure = drawn(dial(DIAL))
    axes = figure.axes[0]
    curve = axes.lines[0]
    assert np.asarray(curve.get_xdata()).tolist() == [64, 128]
    assert np.asarray(curve.get_ydata()).tolist() == [1.3, 1.2]
    squares = [line for line in axes.lines if line.get_marker() == "s"]
    assert [np.asarray(line.get_ydata()).item() for line in squares] == [1.4, 1.1]
    assert axes.get_ylim()[0] == 0.9
    assert axes.get_legend() is None
    assert {"auto", "recompute", "cached", "3 matrix products"} <= set(texts(figure))
    assert_readable(figure)
    assert dial(GRADIENTS) is None
    assert len(drawn(dial([*DIAL, *(replace(r, T=16) for r in DIAL)])).axes) == 2


def test_what_is_no_result_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json must be a result file of the benchmark"):
        plot.main([str(tmp_path / "nothing.json")])
    with pytest.raises(ConfigError, match="at least one file"):
        plot.main([])
    write_results(tmp_path / "a", ABOUT, GRADIENTS)
    with pytest.raises(ConfigError, match="names of their own"):
        plot.main([str(tmp_path / "a.json")] * 2)
