"""The time of one call with filtered gradients over that of exact ones."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import OURS
from flce_dist.launch.plot.drawing import ON_LINES, OUR_COLOR, mark_gemms, shape_title

EXACT_COLOR = "#969696"


def times_figure(records: list[dict[str, Any]]) -> Figure | None:
    """Draw the time of filtered gradients over exact ones alone; None if no run has a time."""
    found = timed(records)
    if not found:
        return None
    figure = Figure(figsize=(6.0, 2.6), layout="constrained")
    draw_times(figure.subplots(), found, {})
    return figure


def is_filtered_times(content: dict[str, Any]) -> bool:
    """Whether this is the content of a file of launch.bench.filtered."""
    records = content.get("records")
    return isinstance(records, list) and any("kept_share" in record for record in records)


def timed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return our runs on the whole vocabulary in the order of frequency that have a time."""
    return [
        r
        for r in records
        if r["impl"] in OURS and r["order"] == "frequency" and r["shards"] == 1 and r["ratio"]
    ]


def draw_times(axes: Axes, found: list[dict[str, Any]], by_eps: dict[float | None, str]) -> None:
    """Draw the times of ``timed`` runs over that of the three GEMMs."""
    for y, r in enumerate(found):
        color = EXACT_COLOR if r["filter_eps"] is None else OUR_COLOR
        axes.barh(y, r["ratio"], height=0.65, color=by_eps.get(r["filter_eps"], color))
        axes.annotate(
            f"{r['ratio']:.2f}", (r["ratio"], y), (5, 0), textcoords="offset points",
            va="center", fontsize=8, bbox=ON_LINES,
        )  # fmt: skip
    mark_gemms(axes.axvline)
    names = [
        r["schedule"] if r["filter_eps"] is None else f"filtered,\n2^{math.log2(r['filter_eps']):g}"
        for r in found
    ]
    axes.set_yticks(range(len(found)), names)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    first = found[0]
    shape = shape_title((first["T"], first["H"], first["V"], first["dtype"], first["P"]))
    axes.set_title(f"Forward and backward, {shape}", fontsize=9, loc="left")
    axes.set_xlabel("time over the three GEMMs of exact gradients", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
