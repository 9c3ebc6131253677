"""Training with filtered gradients beside exact ones: losses, kept tiles, losses by frequency.

The first exact run is the reference. Other exact runs, such as one of another seed, are gray: they
say which differences mean something.
"""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import OURS
from flce_dist.launch.plot.drawing import ON_LINES, mark_gemms, shape_title
from flce_dist.launch.plot.training import (
    SMOOTHED,
    Curve,
    differences,
    model_title,
    points,
    smoothed,
    validation,
)

Runs = dict[str, dict[str, Any]]

REFERENCE_COLOR, EXACT_COLOR, SPREAD_COLOR = "black", "#969696", "#e0e0e0"
FILTERED_COLORS = ("#2c7fb8", "#41b6c4", "#253494")
DROPPED_COLORS = ("#d95f0e", "#fdae61", "#993404")
BEGINNING = 0.2
"""Share of the steps in which differences, large there, do not set the scale of their axis."""
ZOOMED = 4
"""How much of the range of other runs' differences is given to a run that drops tiles."""


def filtered_figure(runs: Runs) -> Figure | None:
    """Draw losses and their differences from exact, tiles kept, and losses by frequency.

    None if the runs are all exact, or none is.
    """
    reference = reference_of(runs)
    if reference is None:
        return None
    figure = Figure(figsize=(9.5, 7.0), layout="constrained")
    panels = figure.subplot_mosaic([["loss", "kept"], ["difference", "bands"]])
    colors = _colors(runs, reference)
    _losses(panels["loss"], runs, colors)
    _differences(panels["difference"], runs, reference, colors)
    _kept(panels["kept"], runs, colors)
    _bands(panels["bands"], runs, reference, colors)
    _finish(panels)
    figure.suptitle(model_title(runs), fontsize=10)
    return figure


def overview(records: list[dict[str, Any]], runs: Runs) -> Figure | None:
    """Draw the time of filtered gradients over exact ones, and what becomes of the loss."""
    reference = reference_of(runs)
    if reference is None:
        return None
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    panels = figure.subplot_mosaic(
        [["time", "loss"], ["time", "difference"]], width_ratios=[1, 1.35], height_ratios=[1.5, 1]
    )
    colors = _colors(runs, reference)
    by_eps = {
        run["config"]["head.filter_eps"]: colors[label]
        for label, run in runs.items()
        if "rank_one_mass" in run
    }
    _times(panels["time"], records, by_eps)
    _losses(panels["loss"], runs, colors)
    _differences(panels["difference"], runs, reference, colors)
    panels["loss"].set_xlabel("")
    panels["loss"].set_xticklabels([])
    _finish(panels)
    figure.suptitle(f"Left: one call. Right: {model_title(runs)}", fontsize=10)
    return figure


def times_figure(records: list[dict[str, Any]]) -> Figure:
    """Draw the time of filtered gradients over exact ones alone."""
    figure = Figure(figsize=(6.0, 2.6), layout="constrained")
    panels = {"time": figure.subplots()}
    _times(panels["time"], records, {})
    _finish(panels)
    return figure


def is_filtered_times(content: dict[str, Any]) -> bool:
    """Whether this is the content of a file of launch.bench.filtered."""
    records = content.get("records")
    return isinstance(records, list) and any("kept_share" in record for record in records)


def reference_of(runs: Runs) -> str | None:
    """Return the label of the first exact run, if another one is not exact."""
    exact = [label for label, run in runs.items() if "kept_share" not in run]
    return exact[0] if 0 < len(exact) < len(runs) else None


def _colors(runs: Runs, reference: str) -> dict[str, str]:
    filtered, dropped = iter(FILTERED_COLORS * len(runs)), iter(DROPPED_COLORS * len(runs))
    colors = {}
    for label, run in runs.items():
        if "kept_share" in run:
            colors[label] = next(dropped if "dropped_mass" in run else filtered)
        else:
            colors[label] = REFERENCE_COLOR if label == reference else EXACT_COLOR
    return colors


def _losses(axes: Axes, runs: Runs, colors: dict[str, str]) -> None:
    for label, run in runs.items():
        curve, dots = smoothed(run, "loss"), validation(run)
        axes.plot(*points(curve), color=colors[label], linewidth=1.0, label=label)
        axes.plot(*points(dots), "o", color=colors[label], markersize=3)
    axes.set_title(f"Loss (mean of {SMOOTHED} steps); dots: validation", fontsize=9, loc="left")
    axes.set_ylabel("nats per token", fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    axes.legend(fontsize=8, frameon=False)


def _differences(axes: Axes, runs: Runs, reference: str, colors: dict[str, str]) -> None:
    """Draw all runs' losses minus the reference's; a run that drops tiles may leave the panel."""
    curve_of = {label: smoothed(run, "loss") for label, run in runs.items()}
    near, far = [0.0], [0.0]
    for label, run in runs.items():
        if label == reference:
            continue
        gaps = differences(curve_of[label], curve_of[reference])
        dots = differences(validation(run), validation(runs[reference]))
        axes.plot(*points(gaps), color=colors[label], linewidth=1.0)
        axes.plot(*points(dots), "o", color=colors[label], markersize=3)
        (far if "dropped_mass" in run else near).extend([*_later(gaps), *_later(dots)])
    span = max(near) - min(near)
    low, high = min(near + far), max(near + far)
    if span:
        low, high = max(low, min(near) - ZOOMED * span), min(high, max(near) + ZOOMED * span)
    margin = 0.15 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.axhline(0.0, color="black", linewidth=0.8)
    beyond = "; dropped: beyond" if high < max(far) or low > min(far) else ""
    axes.set_title(f"Loss minus that of: {reference}{beyond}", fontsize=9, loc="left")
    axes.set_xlabel("step", fontsize=8)


def _later(curve: Curve) -> list[float]:
    start = BEGINNING * max(curve, default=0.0)
    return [value for step, value in curve.items() if step >= start]


def _kept(axes: Axes, runs: Runs, colors: dict[str, str]) -> None:
    for label, run in runs.items():
        if "kept_share" in run:
            curve = smoothed(run, "kept_share")
            # A dropped run keeps nearly what the filtered one with its filter_eps keeps.
            style = "--" if "dropped_mass" in run else "-"
            axes.plot(*points(curve), style, color=colors[label], linewidth=1.2)
    axes.set_ylim(0.0, 1.05 * axes.get_ylim()[1])
    axes.set_title("Share of tiles whose gradients are exact", fontsize=9, loc="left")
    axes.set_xlabel("step", fontsize=8)


def _bands(axes: Axes, runs: Runs, reference: str, colors: dict[str, str]) -> None:
    """Draw the last validation's losses by frequency minus the reference's.

    Behind them, how far other exact runs lie from the reference, to both sides.
    """
    bands = runs[reference]["by_frequency"]
    gaps = {label: _gaps(run, runs[reference]) for label, run in runs.items()}
    exact = [gaps[label] for label, color in colors.items() if color == EXACT_COLOR]
    for place in range(len(bands["from"])):
        spread = max((abs(x[place]) for x in exact if place in x), default=0.0)
        axes.bar(place, 2 * spread, bottom=-spread, width=0.8, color=SPREAD_COLOR, zorder=0)
    shown = [label for label in runs if "kept_share" in runs[label]]
    for i, label in enumerate(shown):
        shift = 0.5 * ((i + 0.5) / len(shown) - 0.5)
        places = [place + shift for place in gaps[label]]
        axes.plot(places, list(gaps[label].values()), "o", color=colors[label], markersize=5)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.use_sticky_edges = False  # of bars, which would end the axis
    axes.autoscale_view()
    axes.set_xticks(range(len(bands["from"])), _band_names(bands))
    axes.set_title(f"Validation loss minus that of: {reference}", fontsize=9, loc="left")
    behind = "\ngray: up to the difference of another exact run" if exact else ""
    axes.set_xlabel(f"place of the label by frequency, share of labels{behind}", fontsize=8)


def _gaps(run: dict[str, Any], reference: dict[str, Any]) -> dict[int, float]:
    """Return how far the last losses lie above the reference's, by the place of the band."""
    pairs = zip(run["by_frequency"]["loss"][-1], reference["by_frequency"]["loss"][-1], strict=True)
    return {
        place: mine - other
        for place, (mine, other) in enumerate(pairs)
        if mine is not None and other is not None
    }


def _band_names(bands: dict[str, list[Any]]) -> list[str]:
    ends = [f"{first - 1:,}" for first in bands["from"][1:]]
    spans = [f"{first:,}\nto {end}" for first, end in zip(bands["from"], ends, strict=False)]
    spans.append(f"from\n{bands['from'][-1]:,}")
    total = sum(bands["tokens"])
    return [
        f"{span}\n{100 * n / total:.0f} %" for span, n in zip(spans, bands["tokens"], strict=True)
    ]


def _times(axes: Axes, records: list[dict[str, Any]], by_eps: dict[float, str]) -> None:
    """Draw our runs on the whole vocabulary in the order of frequency, over the three GEMMs."""
    found = [
        r
        for r in records
        if r["impl"] in OURS and r["order"] == "frequency" and r["shards"] == 1 and r["ratio"]
    ]
    for y, r in enumerate(found):
        color = EXACT_COLOR if r["filter_eps"] is None else FILTERED_COLORS[0]
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


def _finish(panels: dict[str, Axes]) -> None:
    for name, axes in panels.items():
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        if name != "time":
            axes.grid(alpha=0.3)
