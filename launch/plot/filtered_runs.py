"""Training with filtered gradients beside exact ones: losses, kept tiles, losses by frequency.

Runs of one ``head.kind`` and ``head.filter_eps`` are one head: one colour, one entry of the legend.
Differences are from the mean of the exact runs; their range, gray, says which ones mean something.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.plot.drawing import finish
from flce_dist.launch.plot.filtered_times import draw_times, timed
from flce_dist.launch.plot.training import (
    SMOOTHED,
    Curve,
    differences,
    model_title,
    points,
    smoothed,
    validation,
)

Run = dict[str, Any]

EXACT_COLOR, RANGE_COLOR = "black", "#e0e0e0"
FILTERED_COLORS = ("#2c7fb8", "#41b6c4", "#253494")
DROPPED_COLORS = ("#d95f0e", "#fdae61", "#993404")
BEGINNING = 0.2
"""Share of the steps in which differences, large there, do not set the scale of their axis."""
ZOOMED = 4
"""How much of the range of other runs' differences is given to a head that drops tiles."""


@dataclass(frozen=True)
class Head:
    """The runs of one head; they may differ by their seed."""

    kind: str
    filter_eps: float | None
    color: str
    runs: list[Run]

    @property
    def drops(self) -> bool:
        return self.kind == "dropped_tiles"

    @property
    def label(self) -> str:
        name = "exact"
        if self.filter_eps is not None:
            name = f"{'dropped' if self.drops else 'filtered'}, 2^{math.log2(self.filter_eps):g}"
        if len(self.runs) == 1:
            return name
        seeds = {run["config"]["seed"] for run in self.runs}
        return f"{name} ({len(self.runs)} {'seeds' if len(seeds) == len(self.runs) else 'runs'})"

    @property
    def linewidth(self) -> float:
        return 1.2 if len(self.runs) == 1 else 0.7


def filtered_figure(runs: dict[str, Run]) -> Figure | None:
    """Draw losses and their differences from exact, tiles kept, and losses by frequency.

    None if the runs are all exact, or none is.
    """
    heads = _heads(runs)
    if not heads:
        return None
    figure = Figure(figsize=(9.5, 7.0), layout="constrained")
    panels = figure.subplot_mosaic([["loss", "kept"], ["difference", "bands"]])
    _losses(panels["loss"], heads)
    _differences(panels["difference"], heads)
    _kept(panels["kept"], heads)
    _bands(panels["bands"], heads)
    for axes in panels.values():
        finish(axes)
    figure.suptitle(model_title(runs), fontsize=10)
    return figure


def overview(records: list[dict[str, Any]], runs: dict[str, Run]) -> Figure | None:
    """Draw the time of filtered gradients over exact ones, and what becomes of the loss.

    None if no run has a time, or ``filtered_figure`` is.
    """
    heads, found = _heads(runs), timed(records)
    if not (heads and found):
        return None
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    panels = figure.subplot_mosaic(
        [["time", "loss"], ["time", "difference"]], width_ratios=[1, 1.35], height_ratios=[1.5, 1]
    )
    by_eps = {head.filter_eps: head.color for head in heads[1:] if not head.drops}
    draw_times(panels.pop("time"), found, by_eps)
    _losses(panels["loss"], heads)
    _differences(panels["difference"], heads)
    panels["loss"].set_xlabel("")
    panels["loss"].set_xticklabels([])
    for axes in panels.values():
        finish(axes)
    figure.suptitle(f"Left: one call. Right: {model_title(runs)}", fontsize=10)
    return figure


def _heads(runs: dict[str, Run]) -> list[Head]:
    """Return the exact head, then the others; [] if the runs are all exact, or none is."""
    found: dict[tuple[str, float | None], list[Run]] = {}
    for run in runs.values():
        eps = run["config"].get("head.filter_eps")
        kind = "exact" if eps is None else run["config"]["head.kind"]
        found.setdefault((kind, eps), []).append(run)
    exact = found.pop(("exact", None), None)
    if not exact or not found:
        return []
    filtered, dropped = iter(FILTERED_COLORS * len(found)), iter(DROPPED_COLORS * len(found))
    others = [
        Head(kind, eps, next(dropped if kind == "dropped_tiles" else filtered), mine)
        for (kind, eps), mine in found.items()
    ]
    return [Head("exact", None, EXACT_COLOR, exact), *others]


def _losses(axes: Axes, heads: list[Head]) -> None:
    for head in heads:
        for i, run in enumerate(head.runs):
            curve, label = smoothed(run, "loss"), "" if i else head.label
            axes.plot(*points(curve), color=head.color, linewidth=head.linewidth, label=label)
            axes.plot(*points(validation(run)), "o", color=head.color, markersize=3)
    axes.set_title(f"Loss (mean of {SMOOTHED} steps); dots: validation", fontsize=9, loc="left")
    axes.set_ylabel("nats per token", fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    axes.legend(fontsize=8, frameon=False)


def _differences(axes: Axes, heads: list[Head]) -> None:
    """Draw losses minus the mean of the exact runs; a head that drops tiles may leave the panel."""
    exact = heads[0].runs
    mean = _mean([smoothed(run, "loss") for run in exact])
    mean_dots = _mean([validation(run) for run in exact])
    near, far = [0.0], [0.0]
    for head in heads:
        gaps = [differences(smoothed(run, "loss"), mean) for run in head.runs]
        dots = [differences(validation(run), mean_dots) for run in head.runs]
        if head.runs is exact:
            values = _together(gaps)
            low, high = ([end(x) for x in values.values()] for end in (min, max))
            axes.fill_between(list(values), low, high, color=RANGE_COLOR, linewidth=0)
        else:
            for gap in gaps:
                axes.plot(*points(gap), color=head.color, linewidth=head.linewidth)
        for dot in dots:
            axes.plot(*points(dot), "o", color=head.color, markersize=3)
        (far if head.drops else near).extend(x for curve in gaps + dots for x in _later(curve))
    span = max(near) - min(near)
    bottom, top = min(near + far), max(near + far)
    if span:
        bottom, top = max(bottom, min(near) - ZOOMED * span), min(top, max(near) + ZOOMED * span)
    margin = 0.15 * (top - bottom) or 0.1
    axes.set_ylim(bottom - margin, top + margin)
    axes.axhline(0.0, color="black", linewidth=0.8)
    beyond = "; dropped: beyond" if top < max(far) or bottom > min(far) else ""
    axes.set_title(f"Loss minus {_exact(heads)}{beyond}", fontsize=9, loc="left")
    behind = "; gray: range of the exact runs" if len(exact) > 1 else ""
    axes.set_xlabel(f"step{behind}", fontsize=8)


def _kept(axes: Axes, heads: list[Head]) -> None:
    for head in heads[1:]:
        # Dropped heads keep nearly what the filtered ones with their filter_eps keep.
        style = "--" if head.drops else "-"
        for run in head.runs:
            curve = smoothed(run, "kept_share")
            axes.plot(*points(curve), style, color=head.color, linewidth=head.linewidth)
    axes.set_ylim(0.0, 1.05 * axes.get_ylim()[1])
    axes.set_title("Share of tiles whose gradients are exact", fontsize=9, loc="left")
    axes.set_xlabel("step", fontsize=8)


def _bands(axes: Axes, heads: list[Head]) -> None:
    """Draw the last validation's losses by frequency minus the mean of the exact runs.

    Of several seeds: their mean, and a small mark for each. Behind, the range of the exact runs.
    """
    exact, *others = heads
    mean = _mean([_by_frequency(run) for run in exact.runs])
    spread = _together([differences(_by_frequency(run), mean) for run in exact.runs])
    for place, values in spread.items():
        height = max(values) - min(values)
        axes.bar(place, height, bottom=min(values), width=0.8, color=RANGE_COLOR, zorder=0)
    for i, head in enumerate(others):
        shift = 0.5 * ((i + 0.5) / len(others) - 0.5)
        gaps = [differences(_by_frequency(run), mean) for run in head.runs]
        marks = [("o", 5, _mean(gaps)), *(("_", 7, gap) for gap in gaps if len(gaps) > 1)]
        for marker, size, gap in marks:
            places = [place + shift for place in gap]
            axes.plot(places, list(gap.values()), marker, color=head.color, markersize=size)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.use_sticky_edges = False  # of bars, which would end the axis
    axes.autoscale_view()
    bands = exact.runs[0]["by_frequency"]
    axes.set_xticks(range(len(bands["from"])), band_names(bands["from"], bands["tokens"]))
    axes.set_title(f"Validation loss minus {_exact(heads)}", fontsize=9, loc="left")
    behind = "\ngray: range of the exact runs" if len(exact.runs) > 1 else ""
    axes.set_xlabel(f"place of the label by frequency, share of labels{behind}", fontsize=8)


def _exact(heads: list[Head]) -> str:
    """Say what losses are compared with."""
    count = len(heads[0].runs)
    return "that of the exact run" if count == 1 else f"the mean of {count} exact runs"


def _by_frequency(run: Run) -> Curve:
    """Return the last validation's losses, by the place of the band."""
    losses = run["by_frequency"]["loss"][-1]
    return {place: loss for place, loss in enumerate(losses) if loss is not None}


def band_names(begins: list[int], tokens: list[int]) -> list[str]:
    """Name bands of labels by where they begin and what share of all labels they hold."""
    ends = [f"{first - 1:,}" for first in begins[1:]]
    spans = [f"{first:,}\nto {end}" for first, end in zip(begins, ends, strict=False)]
    spans.append(f"from\n{begins[-1]:,}")
    total = sum(tokens)
    return [f"{span}\n{100 * n / total:.0f} %" for span, n in zip(spans, tokens, strict=True)]


def _mean(curves: list[Curve]) -> Curve:
    return {step: fmean(values) for step, values in _together(curves).items()}


def _together(curves: list[Curve]) -> dict[float, list[float]]:
    """Return the values of all curves at each step that all of them have."""
    steps = [step for step in curves[0] if all(step in curve for curve in curves)]
    return {step: [curve[step] for curve in curves] for step in steps}


def _later(curve: Curve) -> list[float]:
    start = BEGINNING * max(curve, default=0.0)
    return [value for step, value in curve.items() if step >= start]
