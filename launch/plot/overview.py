"""Time and memory of one step, ours beside other implementations: for a reader's first look.

A row of two panels for each number of ranks, of the first shape of a file. Ours are the default and
``recompute``; the other schedules are in the other figures.
"""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import OURS
from flce_dist.launch.bench.report import Record
from flce_dist.launch.plot import figures

SHOWN = ("auto", "recompute")  # schedules


def overview(files: Sequence[list[Record]]) -> Figure | None:
    """Draw files of one kind of GPU that have ours beside others; None if there is none."""
    rows = dict[str, tuple[list[Record], float | None]]()
    for records in files:
        for shape, of_shape in list(figures.with_gradients(records).items())[:1]:
            runs = [r for r in of_shape if _is_shown(r)]
            is_ours = [r.impl in OURS for r in runs]
            if any(is_ours) and not all(is_ours):
                gemms = next((r.p50_ms for r in of_shape if r.impl == "gemm3"), None)
                rows[shape] = runs, gemms
    if not rows:
        return None
    heights = [0.6 + 0.24 * len(runs) for runs, _ in rows.values()]
    figure = Figure(figsize=(9.0, 0.8 + sum(heights)), layout="constrained")
    grid = figure.subplots(len(rows), 2, squeeze=False, sharey="row", height_ratios=heights)
    for (left, right), (shape, (runs, gemms)) in zip(grid, rows.items(), strict=True):
        left.set_title(shape, fontsize=9, loc="left")
        _bars(left, runs, lambda r: r.p50_ms, lambda x: f"{x:.1f}")
        _bars(right, runs, lambda r: r.workspace_mib, figures.mib_text)
        if gemms is not None:
            left.axvline(gemms, color="black", linewidth=1)
        figures.name_rows(left, [r.run.name for r in runs], fontsize=8)
    grid[-1][0].set_xlabel("ms; the line: three GEMMs alone", fontsize=8)
    grid[-1][1].set_xlabel("MiB beyond inputs and gradients", fontsize=8)
    figure.suptitle("Forward and backward of output layer and loss", fontsize=10)
    return figure


def _is_shown(r: Record) -> bool:
    if r.op == "floor" or r.p50_ms is None or r.workspace_mib is None:
        return False
    return r.impl not in OURS or (r.schedule in SHOWN and r.max_logits_bytes is None)


def _bars(
    axes: Axes, runs: list[Record], value: Callable[[Record], Any], text: Callable[[float], str]
) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=8)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlim(0, 1.25 * max(value(r) for r in runs))
    for y, r in enumerate(runs):
        figures.draw_bar(axes, y, r, value(r))
        label = text(value(r)) + (" (wrong)" if figures.is_wrong(r) else "")
        figures.write_at(axes, label, (value(r), y), (4, 0), va="center", fontsize=7)
