"""``launch.plot``: which pictures a result file gives, and what is drawn in them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from flce_dist.launch import plot
from flce_dist.launch.bench_files import write_results
from flce_dist.launch.bench_report import Record
from flce_dist.launch.plot_figures import dial, forward_grid, latency, memory

MIB = 2**20
ABOUT = {
    "hardware": "Some GPU",
    "ranks": 1,
    "commit": "abc1234",
    "torch": "2.11.0",
    "nccl": None,
    "peers": {"liger-kernel": "0.8.5", "cut-cross-entropy": None},
}


def record(impl: str, ms: float | None, **fields: Any) -> Record:
    floor = impl.startswith("gemm")
    plain = Record(
        "floor" if floor else "linear_cross_entropy",
        impl, None, "bf16", 8, 64, 16, 1, "forward_backward", None, False,
        p20_ms=ms, p50_ms=ms, p80_ms=ms, workspace_mib=None if floor else 100.0,
    )  # fmt: skip
    return replace(plain, **fields)


GRADIENTS = [
    record("gemm4", 13.0),
    record("gemm3", 10.0),
    record("triton", 11.0, schedule="cached", workspace_mib=0.0),
    record("canonical", 15.0),
    record("cce", 40.0, status="wrong", message="dweight is off by 1e-1"),
    record("liger", None, status="error", message="NotInstalled: liger-kernel is not there. So"),
]
DIAL = [
    record("gemm3", 10.0),
    record("triton", 14.0, schedule="recompute"),
    record("triton", 13.0, schedule="auto", max_logits_bytes=64 * MIB),
    record("triton", 12.0, schedule="auto", max_logits_bytes=128 * MIB),
    record("triton", 11.0, schedule="cached"),
]
FORWARD = [
    record(impl, ms, mode="forward", T=T, ratio=1.25)
    for T in (8, 16)
    for impl, ms in (("gemm1", 4.0), ("triton", 5.0), ("canonical", 10.0))
]


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def texts(figure: Figure | None, panel: int = 0) -> list[str]:
    return [text.get_text().strip() for text in drawn(figure).axes[panel].texts]


def test_each_file_gives_the_pictures_that_it_has_records_for(tmp_path: Path, capsys) -> None:
    for name, found in (("peers", GRADIENTS), ("dial", DIAL), ("grid", FORWARD), ("none", [])):
        write_results(tmp_path / name, ABOUT, found)
    files = [str(tmp_path / f"{name}.json") for name in ("peers", "dial", "grid", "none")]
    assert plot.main([*files, "--out", str(tmp_path / "figures")]) == 0
    expected = {"peers-latency", "peers-memory", "dial-latency", "dial-memory", "dial-dial"}
    expected |= {"grid-forward"}
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == expected
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "figures").iterdir())
    assert str(tmp_path / "figures" / "dial-dial.png") in capsys.readouterr().out


def test_latency_is_over_three_products_and_names_what_is_wrong_or_failed() -> None:
    figure = drawn(latency(GRADIENTS))
    bars = [bar for bar in figure.axes[0].patches if bar.get_width() > 0]  # type: ignore[attr-defined]
    assert [bar.get_width() for bar in bars] == [1.1, 1.5, 4.0]  # type: ignore[attr-defined]
    assert [bar.get_hatch() is not None for bar in bars] == [False, False, True]
    assert bars[0].get_facecolor() != bars[1].get_facecolor() == bars[2].get_facecolor()
    shown = texts(figure)
    assert shown == [
        "1.10",
        "1.50",
        "4.00, wrong dweight",
        "NotInstalled: liger-kernel is not there",
    ]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["triton cached", "canonical", "cce", "liger"]
    assert latency([r for r in GRADIENTS if r.impl != "gemm3"]) is None


def test_shapes_have_panels_with_one_axis() -> None:
    figure = drawn(latency(GRADIENTS + [replace(r, T=16) for r in GRADIENTS[:3]]))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "T=8, H=16, V=64, bf16",
        "T=16, H=16, V=64, bf16",
    ]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


def test_memory_has_a_place_for_nothing() -> None:
    figure = drawn(memory(GRADIENTS))
    assert figure.axes[0].get_xscale() == "log"
    assert texts(figure)[:2] == ["0", "100"]


def test_the_dial_runs_from_recompute_to_cached() -> None:
    axes = drawn(dial(DIAL)).axes[0]
    curve = axes.lines[0]
    assert np.asarray(curve.get_xdata()).tolist() == [64, 128]
    assert np.asarray(curve.get_ydata()).tolist() == [1.3, 1.2]
    squares = [line for line in axes.lines if line.get_marker() == "s"]
    assert [np.asarray(line.get_ydata()).item() for line in squares] == [1.4, 1.1]
    assert dial(GRADIENTS) is None


def test_the_forward_grid_shows_the_floor_and_canonical() -> None:
    figure = drawn(forward_grid(FORWARD))
    assert texts(figure, 0) == ["1.25", "1.25"]
    assert texts(figure, 1) == ["2.00", "2.00"]
    assert len(drawn(forward_grid([r for r in FORWARD if r.impl != "canonical"])).axes) == 1
    wrong = [replace(r, status="wrong") if r.impl == "triton" else r for r in FORWARD]
    assert texts(forward_grid(wrong), 0) == ["1.25 wrong"] * 2
    assert forward_grid(FORWARD[:3]) is None


def test_the_caption_says_what_the_numbers_hold_for() -> None:
    assert plot.caption(ABOUT) == "Some GPU\ncommit abc1234, torch 2.11.0, liger-kernel 0.8.5"
    assert plot.caption({**ABOUT, "ranks": 4}).startswith("4 x Some GPU\n")


def test_what_is_no_result_file_is_named(tmp_path: Path, capsys) -> None:
    assert plot.main([str(tmp_path / "nothing.json")]) == 2
    assert "nothing.json must be a result file of the benchmark" in capsys.readouterr().err
    assert plot.main([]) == 2
    assert "at least one file" in capsys.readouterr().err
    write_results(tmp_path / "a", ABOUT, GRADIENTS)
    assert plot.main([str(tmp_path / "a.json")] * 2) == 2
    assert "names of their own" in capsys.readouterr().err
