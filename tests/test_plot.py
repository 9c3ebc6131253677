"""Figures of records and profiles: what they say, and that nothing in them overlaps."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from flce_dist.launch.about import caption
from flce_dist.launch.bench.files import ProfiledRun, write_profiles, write_results
from flce_dist.launch.bench.peers import PEERS
from flce_dist.launch.bench.profiles import Activity, Profile, profile_of
from flce_dist.launch.plot import __main__ as plot
from flce_dist.launch.plot.figures import best, dial, memory, shares, timeline
from flce_dist.launch.plot.overview import overview
from flce_dist.launch.plot.scaling import efficiency, scaling
from flce_dist.launch.yaml_config import ConfigError
from tests.figures import ABOUT, GRADIENTS, MIB, assert_readable, record, texts

DIAL = [
    record("gemm3", 10.0),
    record("triton", 14.0, schedule="recompute"),
    record("triton", 13.0, schedule="auto", max_logits_bytes=64 * MIB),
    record("triton", 12.0, schedule="auto", max_logits_bytes=128 * MIB),
    record("triton", 11.0, schedule="cached"),
]


def test_each_file_gives_the_pictures_that_it_has_records_for(tmp_path, capsys):
    for name, found in (("peers", GRADIENTS), ("dial", DIAL), ("none", [])):
        write_results(tmp_path / name, ABOUT, found)
    files = [str(tmp_path / f"{name}.json") for name in ("peers", "dial", "none")]
    assert plot.main([*files, "--out", str(tmp_path / "figures")]) == 0
    expected = {"peers-memory", "dial-memory", "dial-dial"}
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == expected
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "figures").iterdir())
    assert str(tmp_path / "figures" / "dial-dial.png") in capsys.readouterr().out


def test_an_overview_has_time_and_memory_of_each_number_of_ranks():
    ours = record("triton", 10.5, schedule="auto", workspace_mib=50.0)
    dialled = replace(ours, max_logits_bytes=64 * MIB)
    on_two = [replace(r, P=2) for r in (ours, record("megatron_fused", 20.0))]
    figure: Any = overview([[*GRADIENTS, ours, dialled], DIAL, on_two])
    times, memories, times_on_two, _ = figure.axes
    labels = [label.get_text() for label in times.get_yticklabels()]
    assert labels == ["PyTorch, fp32 logits", "cut-cross-entropy", "ours, auto"]
    assert [bar.get_width() for bar in times.patches] == [15.0, 40.0, 10.5]
    assert texts(figure) == ["15.0", "40.0 (wrong)", "10.5"]
    assert [bar.get_width() for bar in memories.patches] == [100.0, 100.0, 50.0]
    assert times.lines[0].get_xdata()[0] == 10.0  # three GEMMs
    assert [bar.get_width() for bar in times_on_two.patches] == [10.5, 20.0]
    assert_readable(figure)
    assert overview([DIAL]) is None


def test_an_overview_names_the_versions_of_all_its_files(tmp_path, monkeypatch):
    captions = {}

    def note(path: Path, figure: Any, **_: Any) -> None:
        captions[path.stem] = figure.get_supxlabel()

    monkeypatch.setattr(plot, "write_figure", note)
    of_step = [*GRADIENTS, record("triton", 10.5, schedule="auto", workspace_mib=50.0)]
    on_two = [replace(r, P=2) for r in of_step]
    write_results(tmp_path / "one", ABOUT, of_step)
    newer = {"commit": "def5678", "peers": {"liger-kernel": "0.9.0"}}
    write_results(tmp_path / "two", {**ABOUT, **newer}, on_two)
    plot.draw([tmp_path / "one.json", tmp_path / "two.json"], tmp_path)
    of_both = "Some GPU\ncommit abc1234 and def5678, torch 2.11.0, liger-kernel 0.8.5 and 0.9.0"
    assert captions["one-overview"] == of_both
    assert "commit abc1234," in captions["one-memory"]


def test_memory_names_what_is_wrong_or_failed():
    found = [replace(r, workspace_mib=None) if r.status == "error" else r for r in GRADIENTS]
    found += [record(impl, None, status="skipped") for impl in PEERS]
    figure: Any = memory([*found, *(replace(r, T=16) for r in GRADIENTS[:3])])
    first, second = figure.axes
    bars = [bar for bar in first.patches if bar.get_width() > 0]
    assert [bar.get_width() for bar in bars] == [1.0, 100.0, 100.0]
    assert [bar.get_hatch() is not None for bar in bars] == [False, False, True]
    assert bars[0].get_facecolor() != bars[1].get_facecolor() == bars[2].get_facecolor()
    assert texts(figure) == [
        "0",
        "100",
        "100 MiB; its dweight is wrong",
        "OutOfMemoryError: CUDA out",
    ]
    labels = [label.get_text() for label in first.get_yticklabels()]
    assert labels == ["ours, cached", "PyTorch, fp32 logits", "cut-cross-entropy", "cce exact"]
    *_, below = second.get_xlabel().split("skipped: ")
    assert below.replace("\n", " ").split(", ") == sorted(PEERS)
    assert first.get_xlim() == second.get_xlim()
    assert_readable(figure)


def test_memory_below_one_mib_has_bars_and_digits():
    """As a CPU needs at sizes of a trial."""
    mib_of = {"eager": 0.25, "torch_eager": 0.1, "canonical": 0.0}
    small = [record(impl, 1.0, workspace_mib=mib) for impl, mib in mib_of.items()]
    figure: Any = memory(small)
    (axes,) = figure.axes
    start, end = axes.get_xlim()
    bars = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert bars == [0.25, 0.1, start] and start == 0.01 < 0.25 < end
    assert texts(figure) == ["0.25", "0.1", "0"]
    assert_readable(figure)


def lines_of(axes: Any) -> dict[str, list[list[float]]]:
    """Return x and y of each line with a name."""
    named = [line for line in axes.lines if not line.get_label().startswith("_")]
    return {line.get_label(): np.asarray(line.get_data()).tolist() for line in named}


def test_the_dial_shows_auto_between_recompute_and_cached():
    figure: Any = dial(DIAL)
    budgets = [64.0, 128.0]
    assert lines_of(figure.axes[0]) == {
        "auto": [budgets, [1.3, 1.2]],
        "recompute, 100 MiB": [budgets, [1.4, 1.4]],
        "cached, 100 MiB": [budgets, [1.1, 1.1]],
    }
    assert [x.get_text() for x in figure.axes[0].get_xticklabels()] == ["64\n100", "128\n100"]
    assert_readable(figure)
    assert dial(GRADIENTS) is None


def test_time_over_the_share_of_tokens_that_count():
    auto = record("triton", 14.0, schedule="auto")
    found = [auto, replace(auto, counted=0.25, p50_ms=4.0), replace(auto, skip_ignored=True)]
    first_ones = [replace(auto, counted=x, contiguous=True, p50_ms=99.0) for x in (0.1, 0.25)]
    figure: Any = shares([*DIAL[:2], *found, *first_ones])
    assert lines_of(figure.axes[0]) == {
        "ours, auto": [[0.25, 1.0], [4.0, 14.0]],
        "ours, auto skip_ignored": [[1.0], [14.0]],
    }
    assert_readable(figure)
    assert shares(DIAL) is None


def test_shapes_that_differ_in_the_tokens_that_count_have_panels_of_their_own():
    figure: Any = memory([GRADIENTS[2], replace(GRADIENTS[2], counted=0.5, workspace_mib=50.0)])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["T=8, H=16, V=64, bf16", "T=8, H=16, V=64, bf16, counted=0.5"]
    others = [replace(r, counted=0.5, p50_ms=3.0) for r in OVER_RANKS if r.op != "floor"]
    others += [replace(r, counted=0.5) for r in OVER_RANKS if r.op == "floor"]
    whole: Any = scaling([*OVER_RANKS, *others])
    alone: Any = scaling(OVER_RANKS)
    assert texts(whole) == texts(alone), "numbers of one shape are not another's"
    assert len(whole.axes) == 4


def test_a_file_without_a_figure_is_named(tmp_path, capsys):
    write_results(tmp_path / "empty", ABOUT, [])
    write_results(tmp_path / "some", ABOUT, GRADIENTS)
    files = [str(tmp_path / f"{name}.json") for name in ("empty", "some")]
    assert plot.main([*files, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"{files[0]}: has no records that a figure shows"
    assert sum("no records" in line for line in said) == 1


def test_what_is_no_result_file_is_named(tmp_path):
    missing = r"nothing\.json must be a result file of the benchmark: No such file or directory$"
    with pytest.raises(ConfigError, match=missing):
        plot.main([str(tmp_path / "nothing.json")])
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(ConfigError, match=r"empty\.json .* but is no JSON: Expecting value"):
        plot.main([str(tmp_path / "empty.json")])
    with pytest.raises(ConfigError, match="at least one file"):
        plot.main([])
    write_results(tmp_path / "a", ABOUT, GRADIENTS)
    with pytest.raises(ConfigError, match="names of their own"):
        plot.main([str(tmp_path / "a.json")] * 2)


def test_time_of_best_ids_against_their_number():
    given = [(None, 1), ("rank", 1), ("sample", 1), ("top_k", 1), ("top_k", 64), ("top_k", 256)]
    found = [
        record("triton", 10.0 + i, mode="forward", best=what, ids=k, ratio=1.0 + i / 10)
        for i, (what, k) in enumerate(given)
    ]
    # That have the name of the loss otherwise.
    others = [
        record("triton", 30.0, mode="forward", ratio=9.0, **fields)
        for fields in ({"over": "vocabulary"}, {"divergence": "tv"})
    ]
    figure: Any = best([record("gemm1", 10.0, mode="forward"), *found, *others])
    assert np.allclose(figure.axes[0].lines[1].get_ydata(), 1.0)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"best ids", "the loss", "ranks", "samples"}
    assert np.asarray(lines["best ids"].get_xdata()).tolist() == [1, 64, 256]
    assert np.allclose(lines["best ids"].get_ydata(), [1.3, 1.4, 1.5])
    assert np.allclose(lines["ranks"].get_ydata(), 1.1)
    assert_readable(figure)
    assert best(found[:4]) is None  # one number of ids is no line


PROFILE_ENTRY = {
    "shape": {"T": 8, "H": 4, "V": 16, "dtype": "bf16"},
    "run": "triton cached",
    "kernels": [{"name": "gemm", "launches": 1.0, "time_us": 2}],
    "timeline": [["products", 0.0, 2.0]],
}


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("a", {"T": "8"}, r"records\[0\]\.T must be int, got '8'"),
    ("a", {"p50_ms": [1.0]}, r"records\[0\]\.p50_ms must be float, got \[1\.0\]"),
    ("a", {"imql": "x"}, r"unknown key records\[0\]\.imql; did you mean records\[0\]\.impl"),
    ("a.profile", {"timeline": [["thinking", 0.0, 2.0]]}, r"timeline\[0\]\[0\] must be one of"),
    ("a.profile", {"timeline": [["products", 0.0]]}, r"timeline\[0\] must have 3 items"),
    ("a.profile", {"shape": {"T": 8}}, "with about and profiles: "),
    ("a.profile", {"run": None}, r"profiles\[0\]\.run must be str, got None"),
])  # fmt: skip
def test_a_damaged_value_of_a_file_is_named(tmp_path, name, changes, message):
    entry = PROFILE_ENTRY if "profile" in name else asdict(DIAL[0])
    key = "profiles" if "profile" in name else "records"
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"about": ABOUT, key: [entry]}))
    plot.draw([path], tmp_path / "figures")
    path.write_text(json.dumps({"about": ABOUT, key: [{**entry, **changes}]}))
    with pytest.raises(
        ConfigError, match=rf"{name}\.json must be a .* of the benchmark.*{message}"
    ):
        plot.draw([path], tmp_path / "figures")


def test_the_caption_says_what_the_numbers_hold_for():
    expected = "Some GPU, 4 ranks\ncommit abc1234, torch 2.11.0, liger-kernel 0.8.5"
    assert caption([{**ABOUT, "ranks": 4}], 8.0) == expected


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


def test_scaling_shows_time_and_memory_against_ranks():
    equal = [replace(r, impl="eager") for r in OVER_RANKS if r.impl == "triton"]
    figure: Any = scaling([*OVER_RANKS, *equal])
    times, memory_axes = figure.axes
    found = {line.get_label(): np.asarray(line.get_xdata()).tolist() for line in times.lines}
    rows = [label.get_text() for label in times.get_yticklabels()]
    assert rows == ["three GEMMs", "Megatron, fused loss", "ours, cached", "eager cached"]
    assert found["1 rank"] == [1.0, 1.5, 1.0, 1.0]
    assert found["4 ranks"] == [1.0, 2.0, 1.25, 1.25]
    assert texts(figure) == ["100%, 100%", "91%, 75%", "80%, 80%", "80%, 80%"]
    of_memory = [line for line in memory_axes.lines if line.get_marker() != "None"]
    found_mib = [np.asarray(line.get_xdata()).tolist() for line in of_memory]
    assert found_mib == [[900.0, 200.0, 200.0]] * 3
    assert_readable(figure)
    small = [r if r.workspace_mib is None else replace(r, workspace_mib=0.25) for r in OVER_RANKS]
    on_cpu: Any = scaling(small)
    of_memory = [line for line in on_cpu.axes[1].lines if line.get_marker() != "None"]
    assert [np.asarray(line.get_xdata()).tolist() for line in of_memory] == [[0.25, 0.25]] * 3


def test_scaling_needs_several_numbers_of_ranks_that_succeeded():
    failed = [replace(r, p50_ms=None, status="error") for r in OVER_RANKS if r.P > 1]
    assert scaling([r for r in OVER_RANKS if r.P == 1] + failed) is None
    assert efficiency({r.P: r for r in OVER_RANKS[1:3]}) == {4: 1.0}


def test_files_of_several_numbers_of_ranks_give_one_picture_of_scaling(tmp_path, monkeypatch):
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


def test_the_timeline_has_communication_in_a_row_of_its_own():
    figure: Any = timeline(PROFILED)
    patches = figure.axes[0].patches[:4]
    bars = [(round(patch.get_x(), 6), round(patch.get_width(), 6)) for patch in patches]
    assert bars == [(0, 2), (2, 7), (5, 5), (11, 1)]
    rows = [patch.get_y() + patch.get_height() / 2 for patch in patches]
    assert rows == pytest.approx([0.2, -0.2, 0.2, -0.2])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["ours, cached"], "a floor is its products"
    assert timeline(PROFILED[3:]) is None and timeline([]) is None


def test_a_profile_gives_its_pictures(tmp_path):
    size = {"T": 8, "H": 4, "V": 16, "dtype": "bf16"}
    profiles = {x.run: x.profile for x in PROFILED if x.shape == "T=8"}
    write_profiles(tmp_path / "tp", {**ABOUT, "ranks": 4}, size, profiles)
    figures = tmp_path / "figures"
    assert plot.main([str(tmp_path / "tp.profile.json"), "--out", str(figures)]) == 0
    assert {path.name for path in figures.iterdir()} == {"tp-timeline.png"}
    _, read = plot.read_profiles(tmp_path / "tp.profile.json")
    assert [run for _, run, _ in read] == list(profiles)
    assert {shape for shape, *_ in read} == {"T=8, H=4, V=16, bf16"}
    assert [profile for *_, profile in read] == list(profiles.values())
    write_results(tmp_path / "other.profile", ABOUT, [])
    with pytest.raises(ConfigError, match="must be a profile of the benchmark"):
        plot.main([str(tmp_path / "other.profile.json")])
