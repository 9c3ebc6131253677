"""Time and memory of every run with gradients, as bars: shape by shape, in the order of the file.

Times are relative to three GEMMs (logits and both gradients), also those of runs that compute the
logits twice: the figure compares what a user waits for. Wrong results are hatched, a failed run
shows its message instead of a bar, and what was not installed is listed below.
"""

from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import OURS
from flce_dist.launch.bench.report import Record
from flce_dist.launch.plot.drawing import (
    BLUE,
    ON_LINES,
    OUR_COLOR,
    PRODUCTS,
    WORKSPACE,
    Shape,
    mark_gemms,
    over,
    over_gemms,
    shape_title,
    titled,
    with_gradients,
)

PEER_COLOR, EDGE = "#b0b0b0", "#c0392b"
LEAST_MIB = 1.0
"""Where the memory axis starts: a logarithm has no place for 0."""

Item = TypeVar("Item")


def latency(records: list[Record]) -> Figure | None:
    """Draw the time of forward and backward over three GEMMs."""
    shapes = {shape: over_gemms(found) for shape, found in with_gradients(records).items()}
    figure, panels = _panels({shape: found for shape, found in shapes.items() if found})
    longest = 1.4
    for axes, found in panels:
        values = [over(r.p50_ms, gemms_ms) for r, gemms_ms in found]
        ends = [over(r.p80_ms, gemms_ms) for r, gemms_ms in found]
        labels = [_text(value, ".2f") for value in values]
        _bars(axes, [r for r, _ in found], values, ends, labels)
        for y, (r, gemms_ms) in enumerate(found):
            if r.p20_ms is not None and r.p80_ms is not None:
                spread = (r.p20_ms / gemms_ms, r.p80_ms / gemms_ms)
                axes.plot(spread, (y, y), color="black", linewidth=1)
        mark_gemms(axes.axvline)
        longest = max([longest, *(value for value in ends if value is not None)])
    _one_axis(panels, (0, 1.3 * longest), f"time over {PRODUCTS}{_missing(records)}")
    return titled(figure, f"Forward and backward of output layer and loss: time ({BLUE})")


def memory(records: list[Record]) -> Figure | None:
    """Draw the memory beyond inputs and gradients."""
    shapes = {
        shape: [r for r in found if r.op != "floor"]
        for shape, found in with_gradients(records).items()
    }
    figure, panels = _panels(shapes)
    most = 10.0
    for axes, found in panels:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
        values = [
            None if r.workspace_mib is None else max(r.workspace_mib, LEAST_MIB) for r in found
        ]
        labels = [_text(r.workspace_mib, ",.0f") for r in found]
        _bars(axes, found, values, values, labels)
        most = max([most, *(value for value in values if value is not None)])
    _one_axis(panels, (LEAST_MIB, 8 * most), f"{WORKSPACE}{_missing(records)}")
    return titled(figure, f"Forward and backward of output layer and loss: memory ({BLUE})")


def _missing(records: list[Record]) -> str:
    names = sorted({r.impl for r in records if r.not_installed})
    return f"\nnot installed: {', '.join(names)}" if names else ""


def _panels(shapes: dict[Shape, list[Item]]) -> tuple[Figure | None, list[tuple[Axes, list[Item]]]]:
    """Return a figure with a panel for each shape, above each other, and the runs of each."""
    if not shapes:
        return None, []
    heights = [0.6 + 0.25 * len(found) for found in shapes.values()]
    figure = Figure(figsize=(8.0, 0.9 + sum(heights)), layout="constrained")
    stacked = figure.subplots(len(shapes), 1, squeeze=False, height_ratios=heights)[:, 0]
    for shape, axes in zip(shapes, stacked, strict=True):
        axes.set_title(shape_title(shape), fontsize=9, loc="left")
    return figure, list(zip(stacked, shapes.values(), strict=True))


def _one_axis(
    panels: list[tuple[Axes, list[Item]]], limits: tuple[float, float], label: str
) -> None:
    """Give all panels the same horizontal axis, and the last its label."""
    for axes, _ in panels:
        axes.set_xlim(*limits)
        axes.tick_params(axis="x", labelsize=8)
    if panels:
        panels[-1][0].set_xlabel(label, fontsize=8)


def _bars(
    axes: Axes,
    found: list[Record],
    values: list[float | None],
    ends: list[float | None],
    labels: list[str],
) -> None:
    """Draw a bar for each record, downwards, its label behind ``ends``.

    None stands for a run that failed.
    """
    rows = zip(found, values, ends, labels, strict=True)
    for y, (r, value, end, label) in enumerate(rows):
        if value is None or end is None:
            text = f" {(r.message or r.status).split('. ')[0]:.70}"
            at = axes.get_yaxis_transform()
            axes.text(
                0.0, y, text, va="center", fontsize=7, color=EDGE, transform=at, bbox=ON_LINES
            )
            continue
        wrong = r.status == "wrong"
        axes.barh(
            y,
            value,
            height=0.7,
            color=OUR_COLOR if r.impl in OURS else PEER_COLOR,
            hatch="////" if wrong else None,
            edgecolor=EDGE if wrong else None,
        )
        what = (r.message or "").split(" ")[0]  # of "dweight is off by ..."
        text = f"{label}{f', wrong {what}' if wrong else ''}"
        axes.annotate(
            text, (end, y), (5, 0), textcoords="offset points", va="center",
            fontsize=7, color=EDGE if wrong else "black", bbox=ON_LINES,
        )  # fmt: skip
    axes.set_yticks(range(len(found)), [r.run.name for r in found], fontsize=8)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
