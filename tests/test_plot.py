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
from flce_dist.launch.bench_files import write_profiles, write_results
from flce_dist.launch.bench_profile import Activity, Profile, profile_of
from flce_dist.launch.bench_report import Record
from flce_dist.launch.plot_figures import dial, forward_grid, latency, memory
from flce_dist.launch.plot_profiles import ProfiledRun, breakdown, timeline
from flce_dist.launch.plot_scaling import efficiency, scaling

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


def test_the_breakdown_stacks_what_a_call_spends_its_time_on() -> None:
    figure = drawn(breakdown(PROFILED))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["T=8", "T=16"]
    assert bars(figure, 0)[:4] == [(0, 7), (7, 0), (7, 0), (7, 0)]
    assert bars(figure, 0)[4:] == [(0, 7), (7, 1), (8, 3), (11, 1)]
    assert texts(figure) == ["7.00", "12.00, 3.00 of 7.00 exposed"]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["gemm3", "triton cached SP"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "matrix products", "other kernels", "exposed communication", "idle",
    ]  # fmt: skip
    assert breakdown(PROFILED[3:]) is None and breakdown([]) is None


def test_the_timeline_has_communication_in_a_row_of_its_own() -> None:
    figure = drawn(timeline(PROFILED))
    patches: Any = drawn(figure).axes[0].patches
    assert bars(figure, 0)[:4] == [(0, 2), (2, 7), (5, 5), (11, 1)]
    rows = [patch.get_y() + patch.get_height() / 2 for patch in patches[:4]]
    assert rows == pytest.approx([0.2, -0.2, 0.2, -0.2])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["triton cached SP"], "a floor is its products"
    assert timeline(PROFILED[3:]) is None


def test_a_profile_gives_its_pictures(tmp_path: Path, capsys) -> None:
    size = {"T": 8, "H": 4, "V": 16, "dtype": "bf16"}
    profiles = {x.run: x.profile for x in PROFILED if x.shape == "T=8"}
    write_profiles(tmp_path / "tp", {**ABOUT, "ranks": 4}, size, profiles)
    figures = tmp_path / "figures"
    assert plot.main([str(tmp_path / "tp.profile.json"), "--out", str(figures)]) == 0
    assert {path.name for path in figures.iterdir()} == {"tp-breakdown.png", "tp-timeline.png"}
    _, read = plot.read_profiles(tmp_path / "tp.profile.json")
    assert [(shape, run) for shape, run, _ in read] == [
        ("T=8, H=4, V=16, bf16", run) for run in profiles
    ]
    assert [profile for *_, profile in read] == list(profiles.values())
    write_results(tmp_path / "other.profile", ABOUT, [])
    assert plot.main([str(tmp_path / "other.profile.json")]) == 2
    assert "must be a profile of the benchmark" in capsys.readouterr().err


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
    figure = drawn(scaling(OVER_RANKS))
    times, memory_axes = figure.axes
    found = {line.get_label(): np.asarray(line.get_ydata()).tolist() for line in times.lines}
    assert found["triton cached SP: 80%, 80%"] == [40.0, 25.0, 12.5]
    assert found["megatron_fused SP: 91%, 75%"] == [60.0, 33.0, 20.0]
    assert found["gemm3: 100%, 100%"] == [40.0, 20.0, 10.0]
    assert not any(str(label).startswith("gemm4") for label in found)
    linear = [x for x in times.lines if x.get_linestyle() == ":"]
    assert np.asarray(linear[1].get_ydata()).tolist() == [40.0, 20.0, 10.0]
    assert len(memory_axes.lines) == 2, "a floor has no memory of its own"
    assert np.asarray(memory_axes.lines[0].get_ydata()).tolist() == [200.0] * 3
    assert np.asarray(times.lines[0].get_xdata()).tolist() == [1, 2, 4]


def test_scaling_needs_several_numbers_of_ranks() -> None:
    assert scaling([r for r in OVER_RANKS if r.P == 2]) is None
    assert scaling([]) is None
    failed = [replace(r, p50_ms=None, status="error") for r in OVER_RANKS if r.P > 1]
    assert scaling([r for r in OVER_RANKS if r.P == 1] + failed) is None
    two_and_four = {r.P: r for r in OVER_RANKS[1:3]}
    assert efficiency(two_and_four) == {4: 1.0}


def test_files_of_several_numbers_of_ranks_give_one_picture_of_scaling(tmp_path: Path) -> None:
    for P in (1, 2, 4):
        about = {**ABOUT, "ranks": P, "commit": "abc1234" if P < 4 else "def5678"}
        write_results(tmp_path / f"tp-P{P}", about, [r for r in OVER_RANKS if r.P == P])
    write_results(tmp_path / "elsewhere", {**ABOUT, "hardware": "B"}, [OVER_RANKS[0]])
    files = [tmp_path / f"{name}.json" for name in ("tp-P1", "tp-P2", "tp-P4", "elsewhere")]
    written = plot.draw(files, tmp_path / "figures")
    assert [path.name for path in written if "scaling" in path.name] == ["tp-P1-scaling.png"]
    write_results(tmp_path / "elsewhere", {**ABOUT, "hardware": "B"}, [OVER_RANKS[1]])
    written = plot.draw([files[0], files[3]], tmp_path / "figures")
    assert not any("scaling" in path.name for path in written), "ranks of different hardware"


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
