"""Memory of every run with gradients, as bars: shape by shape, in the order of the file.

Wrong results are hatched, a failed run shows its message instead of a bar, and what was not
installed is listed below.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import OURS
from flce_dist.launch.bench.report import Record
from flce_dist.launch.plot.drawing import (
    BLUE,
    ON_LINES,
    OUR_COLOR,
    WORKSPACE,
    panels,
    shape_title,
    with_gradients,
)

PEER_COLOR, EDGE = "#b0b0b0", "#c0392b"
LEAST_MIB = 1.0
"""Where the axis starts: a logarithm has no place for 0."""


def memory(records: list[Record]) -> Figure | None:
    """Draw the memory beyond inputs and gradients."""
    shapes = {
        shape_title(shape): [r for r in found if r.op != "floor"]
        for shape, found in with_gradients(records).items()
    }
    figure, stacked = panels(shapes, width=8.0, height=0.25)
    if figure is None:
        return None
    most = max([10.0, *(r.workspace_mib or 0.0 for found in shapes.values() for r in found)])
    for axes, found in stacked:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.set_xlim(LEAST_MIB, 8 * most)
        axes.tick_params(axis="x", labelsize=8)
        _bars(axes, found)
    missing = ", ".join(sorted({r.impl for r in records if r.not_installed}))
    below = f"\nnot installed: {missing}" if missing else ""
    stacked[-1][0].set_xlabel(f"{WORKSPACE}{below}", fontsize=8)
    figure.suptitle(f"Forward and backward of output layer and loss: memory ({BLUE})", fontsize=10)
    return figure


def _bars(axes: Axes, found: list[Record]) -> None:
    """Draw a bar for each record, downwards, its label behind it."""
    for y, r in enumerate(found):
        if r.workspace_mib is None:
            text = f" {(r.message or r.status).split('. ')[0]:.70}"
            at = axes.get_yaxis_transform()
            axes.text(
                0.0, y, text, va="center", fontsize=7, color=EDGE, transform=at, bbox=ON_LINES
            )
            continue
        end, wrong = max(r.workspace_mib, LEAST_MIB), r.status == "wrong"
        axes.barh(
            y,
            end,
            height=0.7,
            color=OUR_COLOR if r.impl in OURS else PEER_COLOR,
            hatch="////" if wrong else None,
            edgecolor=EDGE if wrong else None,
        )
        what = (r.message or "").split(" ")[0]  # of "dweight is off by ..."
        text = f"{r.workspace_mib:,.0f}{f', wrong {what}' if wrong else ''}"
        axes.annotate(
            text, (end, y), (5, 0), textcoords="offset points", va="center",
            fontsize=7, color=EDGE if wrong else "black", bbox=ON_LINES,
        )  # fmt: skip
    axes.set_yticks(range(len(found)), [r.run.name for r in found], fontsize=8)
    axes.set_ylim(len(found) - 0.5, -0.5)
