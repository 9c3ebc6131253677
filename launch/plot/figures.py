"""Pictures of one file: memory of every run, time against a budget or a share, a profile's calls.

All are of runs with gradients, a panel for each shape, in the order of the file.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import OURS
from flce_dist.launch.bench.files import ProfiledRun
from flce_dist.launch.bench.floors import FLOORS
from flce_dist.launch.bench.profiles import Kind
from flce_dist.launch.bench.report import MIB, Record

OUR_COLOR = "#2c7fb8"
PEER_COLOR = "#b0b0b0"
EDGE = "#c0392b"  # of a wrong result, and messages of failed runs
NAMES = {
    "triton": "ours,", "indexed": "ours, rows by a mask", "cce": "cut-cross-entropy",
    "cce_unfiltered": "cut-cross-entropy, unfiltered", "liger_fp32": "liger, fp32 loss",
    "gemm1": "one GEMM", "gemm2": "two GEMMs", "gemm3": "three GEMMs", "gemm4": "four GEMMs",
    "gemm2_forward": "two GEMMs", "gemm6": "six GEMMs",
    "torch_eager": "PyTorch",
    "torch_compile": "torch.compile", "torch_compile_fp32": "torch.compile, fp32 loss",
    "canonical": "PyTorch, fp32 logits",
    "megatron_fused": "Megatron, fused loss", "megatron_unfused": "Megatron, unfused loss",
}  # fmt: skip
"""What readers call an implementation, if not by its name."""
WORKSPACE = "MiB at the peak, beyond inputs and gradients"
ON_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
"""Behind a text that reference lines may cross."""
KINDS: dict[Kind, tuple[str, str]] = {
    "products": ("matrix products", "#2c7fb8"),
    "other": ("other kernels", "#7fcdbb"),
    "communication": ("communication", "#d95f0e"),
}
"""Label and colour of each kind of kernel."""


def panels(heights: dict[str, float], width: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel of so many inches for each title."""
    inches = list(heights.values())
    figure = Figure(figsize=(width, 0.8 + sum(inches)), layout="constrained")
    stacked = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=inches)[:, 0])
    for title, axes in zip(heights, stacked, strict=True):
        axes.set_title(title, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    return figure, stacked


def label_of(run: str) -> str:
    impl, *words = run.replace(" SP", "").split(maxsplit=1)
    return " ".join((NAMES.get(impl, impl.replace("_", " ")), *words)).rstrip(",")


def name_rows(axes: Axes, runs: Sequence[str], **style: Any) -> None:
    """Name the rows of a panel, downwards."""
    names = [label_of(run) for run in runs]
    axes.set_yticks(range(len(names)), names, **style)
    axes.set_ylim(len(names) - 0.5, -0.5)


def least_mib(records: Iterable[Record]) -> float:
    """Return where an axis of memory starts: a logarithm has no place for 0.

    It is 1 MiB, or the power of ten below the least memory, which some runs on a CPU need.
    """
    measured = [r.workspace_mib for r in records if r.workspace_mib]
    return min([1.0, *(10.0 ** (math.ceil(math.log10(mib)) - 1) for mib in measured)])


def mib_text(mib: float) -> str:
    """Return whole MiB, or two digits of less than 10."""
    return f"{mib:,.0f}" if mib == 0.0 or mib >= 10.0 else f"{mib:.2g}"


def write_at(axes: Axes, text: str, xy: tuple[float, float], points: Any, **style: Any) -> None:
    """Write over lines, ``points`` away from a place in data."""
    axes.annotate(text, xy, points, textcoords="offset points", bbox=ON_LINES, **style)


def mark_gemms(line: Callable[..., Any]) -> None:
    """Draw a reference line for three and for four GEMMs over three, by axvline or axhline."""
    line(1.0, color="black", linewidth=1)
    line(4 / 3, color="black", linewidth=0.8, linestyle=":")


def with_gradients(
    records: Iterable[Record], *, of_any_share: bool = False
) -> dict[str, list[Record]]:
    return by_shape(records, "forward_backward", of_any_share=of_any_share)


def by_shape(
    records: Iterable[Record], mode: str, *, of_any_share: bool = False
) -> dict[str, list[Record]]:
    """Group what was not skipped by shape, floors too; a shape with floors alone drops out.

    With ``of_any_share`` shapes that differ in the tokens that count are one.
    """
    shapes: dict[str, list[Record]] = {}
    for r in records:
        if r.mode == mode and not r.is_skipped:
            whole = replace(r.shape, counted=1.0, contiguous=False) if of_any_share else r.shape
            ranks = f", {r.P} ranks" if r.P > 1 else ""
            shapes.setdefault(f"{whole.title}{ranks}", []).append(r)
    return {s: of_shape for s, of_shape in shapes.items() if any(r.op != "floor" for r in of_shape)}


def memory(records: list[Record]) -> Figure | None:
    """Draw the memory beyond inputs and gradients, as bars.

    Wrong results are hatched, a failed run shows its message instead of a bar, and what was
    skipped is listed below.
    """
    grouped = with_gradients(records)
    shapes = {s: [r for r in of_shape if r.op != "floor"] for s, of_shape in grouped.items()}
    if not shapes:
        return None
    figure, stacked = panels({s: 0.8 + 0.25 * len(of_shape) for s, of_shape in shapes.items()}, 8.0)
    drawn = [r for of_shape in shapes.values() for r in of_shape]
    least = least_mib(drawn)
    most = max([10.0 * least, *(r.workspace_mib or 0.0 for r in drawn)])
    for axes, of_shape in zip(stacked, shapes.values(), strict=True):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.set_xlim(least, 8 * most)
        axes.tick_params(axis="x", labelsize=8)
        for y, r in enumerate(of_shape):
            _bar(axes, y, r, least)
        name_rows(axes, [r.run.name for r in of_shape], fontsize=8)
    skipped = ", ".join(sorted({r.impl for r in records if r.is_skipped}))
    below = textwrap.fill(f"skipped: {skipped}", 80) if skipped else ""
    stacked[-1].set_xlabel(f"{WORKSPACE} (logarithmic)\n{below}".rstrip(), fontsize=8)
    figure.suptitle("Forward and backward of output layer and loss: memory", fontsize=10)
    return figure


def _bar(axes: Axes, y: int, r: Record, least: float) -> None:
    """Draw the memory of one record, from ``least`` on, and its label, or its message."""
    style: dict[str, Any] = {"va": "center", "fontsize": 7}
    if r.workspace_mib is None:
        text = f" {(r.message or r.status).split('. ')[0]:.70}"
        at = axes.get_yaxis_transform()
        axes.text(0.0, y, text, color=EDGE, transform=at, bbox=ON_LINES, **style)
        return
    end = max(r.workspace_mib, least)
    text = mib_text(r.workspace_mib)
    if is_wrong(r):
        text += f" MiB; its {(r.message or '').split(' ')[0]} is wrong"  # of "dweight is off by"
    draw_bar(axes, y, r, end)
    write_at(axes, text, (end, y), (5, 0), color=EDGE if is_wrong(r) else "black", **style)


def draw_bar(axes: Axes, y: int, r: Record, length: float) -> None:
    """Draw the bar of a record: its colour says whose it is, hatches that its result is wrong."""
    color = OUR_COLOR if r.impl in OURS else PEER_COLOR
    hatch = "////" if is_wrong(r) else None
    edge = EDGE if is_wrong(r) else None
    axes.barh(y, length, height=0.7, color=color, hatch=hatch, edgecolor=edge)


def is_wrong(r: Record) -> bool:
    return r.status == "wrong"


Lines = dict[str, dict[float, float]]
"""What one panel shows: for each name, y at each x."""


def dial(records: list[Record]) -> Figure | None:
    """Draw time against the budget of schedule auto, beside schedules without one."""
    drawn: dict[str, Lines] = {}
    ticks: list[dict[float, str]] = []
    for shape, of_shape in with_gradients(records).items():
        gemms_ms = next((r.p50_ms for r in of_shape if r.impl == "gemm3"), None)
        ours = [r for r in of_shape if gemms_ms and r.p50_ms and r.impl in OURS]
        times = [(r, mib_text(r.workspace_mib), r.p50_ms / gemms_ms) for r in ours]  # type: ignore
        dialled = [(r.max_logits_bytes / MIB, mib, y) for r, mib, y in times if r.max_logits_bytes]
        if len(dialled) > 1:
            auto = {x: y for x, _, y in dialled}
            drawn[shape] = {"auto": auto}
            ticks.append({x: f"{x:g}\n{mib}" for x, mib, _ in dialled})
            for r, mib, y in times:
                if r.schedule in ("recompute", "cached"):
                    drawn[shape][f"{r.schedule}, {mib} MiB"] = {min(auto): y, max(auto): y}
    figure = _against(drawn, "Time against the budget of schedule auto", "log")
    for axes, names in zip(figure.axes if figure else (), ticks, strict=True):
        mark_gemms(axes.axhline)
        axes.set_xticks(list(names), list(names.values()))
        axes.set_xlabel("max_logits_bytes of auto, and what it takes, MiB", fontsize=8)
        axes.set_ylabel("time over three GEMMs; dotted: four", fontsize=8)
    return figure


def shares(records: list[Record]) -> Figure | None:
    """Draw time against the share of tokens that count, of random masks."""
    drawn: dict[str, Lines] = {}
    for shape, of_shape in with_gradients(records, of_any_share=True).items():
        lines: Lines = {}
        for r in of_shape:
            is_drawn = r.op != "floor" and r.schedule in (None, "auto") and not r.contiguous
            if is_drawn and r.p50_ms is not None:
                lines.setdefault(r.run.name, {})[r.counted] = r.p50_ms
        if any(len(line) > 1 for line in lines.values()):
            drawn[shape] = lines
    figure = _against(drawn, "Time against the share of tokens that count", "linear")
    for axes in figure.axes if figure else ():
        axes.set_xlim(left=0.0)
        axes.set_ylim(bottom=0.0)
        axes.set_xlabel("share of tokens that count", fontsize=8)
        axes.set_ylabel("forward and backward, ms", fontsize=8)
    return figure


def best(records: list[Record]) -> Figure | None:
    """Draw the time of best ids against their number, beside the loss, ranks and samples."""
    drawn: dict[str, Lines] = {}
    for shape, of_shape in by_shape(records, "forward").items():
        times = {
            (r.impl, r.best, r.ids): r.ratio
            for r in of_shape
            if r.ratio is not None and r.over is None and r.divergence is None
        }
        for impl in OURS:
            line = {
                float(k): y for (of, kind, k), y in times.items() if (of, kind) == (impl, "top_k")
            }
            if len(line) < 2:
                continue
            drawn[shape] = {"best ids": line}
            for name, kind in (("the loss", None), ("ranks", "rank"), ("samples", "sample")):
                if (y := times.get((impl, kind, 1))) is not None:
                    drawn[shape][name] = {min(line): y, max(line): y}
    figure = _against(drawn, "Time of the best ids against their number", "log")
    for axes in figure.axes if figure else ():
        axes.set_xlabel("ids of each token", fontsize=8)
        axes.set_ylabel("forward, over one GEMM", fontsize=8)
    return figure


def _against(drawn: dict[str, Lines], title: str, scale: str) -> Figure | None:
    """Draw a panel of named lines for each shape, and a tick at each x."""
    if not drawn:
        return None
    figure, stacked = panels(dict.fromkeys(drawn, 3.4), 8.0)
    for axes, lines in zip(stacked, drawn.values(), strict=True):
        for (name, points), marker in zip(lines.items(), "osD^v<>*" * len(lines), strict=False):
            xs, ys = zip(*sorted(points.items()), strict=True)
            axes.plot(xs, ys, marker=marker, label=label_of(name))
        places = sorted({x for points in lines.values() for x in points})
        axes.set_xscale(scale)
        axes.set_xticks(places, [f"{x:g}" for x in places])
        axes.minorticks_off()
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def timeline(profiles: list[ProfiledRun]) -> Figure | None:
    """Draw one call of each run: computing above, communication below; None without time lines."""
    shapes: dict[str, list[ProfiledRun]] = {}
    for x in profiles:
        if x.profile.timeline and x.run not in FLOORS:
            shapes.setdefault(x.shape, []).append(x)
    if not shapes:
        return None
    figure, stacked = panels({s: 0.8 + 0.6 * len(runs) for s, runs in shapes.items()}, 9.0)
    for axes, runs in zip(stacked, shapes.values(), strict=True):
        for y, x in enumerate(runs):
            for kind, start_us, end_us in x.profile.timeline:
                below = kind == "communication"
                color = KINDS[kind][1]
                axes.barh(  # a short one is little more than its edge
                    y + (0.2 if below else -0.2), (end_us - start_us) / 1e3, left=start_us / 1e3,
                    height=0.36, color=color, edgecolor=color if below else "dimgray",
                    linewidth=0.8 if below else 0.2,
                )  # fmt: skip
        for label, color in KINDS.values():
            axes.barh(0, 0, color=color, label=label)
        last = max(end_us for x in runs for _, _, end_us in x.profile.timeline) / 1e3
        axes.set_xlim(0, 1.02 * last)
        axes.set_xlabel("ms", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        name_rows(axes, [x.run for x in runs], fontsize=8)
        for y in range(1, len(runs)):
            axes.axhline(y - 0.5, color="lightgray", linewidth=0.6)
    handles, labels = stacked[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=7)
    title = "One call on rank 0: computing, and communication below it"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure
