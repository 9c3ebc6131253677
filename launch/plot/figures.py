"""The benchmark's pictures, each a function of records; None where there are none for it.

Latency and memory show every run with gradients, shape by shape, in the order of the file. All
are held against the same three products (logits and both gradients), also those that compute the
logits twice: the picture compares what a user waits for. Results that are wrong are hatched, a run
that failed says so in its place, and what was not installed is named below.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import OURS
from flce_dist.launch.bench.report import Record

OUR_COLOR, PEER_COLOR, EDGE = "#2c7fb8", "#b0b0b0", "#c0392b"
MIB = 2**20
BLUE = "blue: linear_cross_entropy"
PRODUCTS = "3 matrix products; dotted: 4 products, logits computed twice"
WORKSPACE = "MiB at the peak, beyond inputs and gradients"
ON_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
"""Behind a text that reference lines may cross."""
LEAST_MIB = 1.0
"""Where the memory axis starts: a logarithm has no place for 0."""

Shape = tuple[int, int, int, str, int]  # T, H, V, dtype, P
Grid = dict[tuple[int, int], Record]  # by T and V
Item = TypeVar("Item")


def latency(records: list[Record]) -> Figure | None:
    """Draw the time of forward and backward over the three products."""
    shapes = {shape: _over_products(found) for shape, found in _with_gradients(records).items()}
    figure, panels = _panels({shape: found for shape, found in shapes.items() if found})
    longest = 1.4
    for axes, found in panels:
        values = [_over(r.p50_ms, products) for r, products in found]
        ends = [_over(r.p80_ms, products) for r, products in found]
        labels = [_text(value, ".2f") for value in values]
        _bars(axes, [r for r, _ in found], values, ends, labels)
        for y, (r, products) in enumerate(found):
            if r.p20_ms is not None and r.p80_ms is not None:
                spread = (r.p20_ms / products, r.p80_ms / products)
                axes.plot(spread, (y, y), color="black", linewidth=1)
        mark_products(axes.axvline)
        longest = max([longest, *(value for value in ends if value is not None)])
    _one_axis(panels, (0, 1.3 * longest), f"time over {PRODUCTS}{_missing(records)}")
    return _titled(figure, f"Forward and backward of output layer and loss: time ({BLUE})")


def memory(records: list[Record]) -> Figure | None:
    """Draw the memory beyond inputs and gradients."""
    shapes = {
        shape: [r for r in found if r.op != "floor"]
        for shape, found in _with_gradients(records).items()
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
    return _titled(figure, f"Forward and backward of output layer and loss: memory ({BLUE})")


def dial(records: list[Record]) -> Figure | None:
    """Draw time against the budget of schedule auto, with recompute and cached at the ends."""
    curves: dict[Shape, dict[float, float]] = {}
    ends: dict[Shape, dict[str, float]] = {}
    for shape, found in _with_gradients(records).items():
        for r, products in _over_products(found):
            value = _over(r.p50_ms, products)
            if value is None or r.impl not in OURS:
                continue
            if r.schedule == "auto" and r.max_logits_bytes is not None:
                curves.setdefault(shape, {})[r.max_logits_bytes / MIB] = value
            elif r.schedule in ("recompute", "cached") and r.max_logits_bytes is None:
                ends.setdefault(shape, {})[r.schedule] = value
    curves = {shape: curve for shape, curve in curves.items() if len(curve) > 1}
    if not curves:
        return None
    figure = Figure(figsize=(8.0, 0.8 + 3.4 * len(curves)), layout="constrained")
    stacked = figure.subplots(len(curves), 1, squeeze=False)[:, 0]
    for (shape, curve), axes in zip(curves.items(), stacked, strict=True):
        axes.set_title(_name(shape), fontsize=9, loc="left")
        _dial(axes, curve, ends.get(shape, {}))
    return _titled(figure, "Memory against time: the budget of schedule auto")


def _dial(axes: Axes, curve: dict[float, float], ends: dict[str, float]) -> None:
    """Draw one shape's ``curve``, time over three products by budget in MiB."""
    budgets = sorted(curve)
    axes.plot(budgets, [curve[x] for x in budgets], "o-", color=OUR_COLOR)
    _above(axes, "auto", budgets[0], curve[budgets[0]], "left")
    # The ends have no budget; their places are one step outside those of auto.
    places = {"recompute": (budgets[0] / 2, budgets[0]), "cached": (budgets[-1] * 2, budgets[-1])}
    for schedule, value in ends.items():
        place, nearest = places[schedule]
        axes.plot((place, nearest), (value, curve[nearest]), "--", color=OUR_COLOR, linewidth=0.8)
        axes.plot(place, value, "s", color=OUR_COLOR)
        _above(axes, schedule, place, value, "right" if place < nearest else "left")
    mark_products(axes.axhline)
    right = axes.get_yaxis_transform()
    for products, text in (
        (1.0, "3 matrix products"),
        (4 / 3, "4 matrix products: logits computed twice"),
    ):
        axes.annotate(
            text, (0.99, products), (0, -3), right, "offset points",
            ha="right", va="top", fontsize=8,
        )  # fmt: skip
    values = [*curve.values(), *ends.values()]
    axes.set_ylim(min(0.9, *values), max(1.4, *values) + 0.1)
    axes.set_xscale("log", base=2)
    axes.set_xlim(budgets[0] / 4, budgets[-1] * 4)
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    axes.set_xlabel("max_logits_bytes of auto, MiB", fontsize=8)
    axes.set_ylabel("time of forward and backward over 3 matrix products", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _above(axes: Axes, text: str, x: float, y: float, side: Literal["left", "right"]) -> None:
    """Write above a point, with the text's left or right end over it: no line goes there."""
    at = (4 if side == "right" else -4, 7)
    axes.annotate(
        text, (x, y), at, textcoords="offset points", ha=side, color=OUR_COLOR, fontsize=9,
        bbox=ON_LINES,
    )  # fmt: skip


def forward_grid(records: list[Record]) -> Figure | None:
    """Draw tables over T and V: our loss alone over its floor, and canonical's time over ours."""
    grids: dict[tuple[int, str, int], dict[str, Grid]] = {}
    for r in records:
        if r.mode == "forward" and r.op != "floor" and r.status != "error":
            role = "ours" if r.impl in OURS else r.impl
            grids.setdefault((r.H, r.dtype, r.P), {}).setdefault(role, {})[r.T, r.V] = r
    grids = {key: roles for key, roles in grids.items() if len(roles.get("ours", {})) > 1}
    if not grids:
        return None
    columns = 2 if any("canonical" in roles for roles in grids.values()) else 1
    heights = [1.2 + 0.4 * len({T for T, _ in roles["ours"]}) for roles in grids.values()]
    figure = Figure(figsize=(5.0 * columns, 0.4 + sum(heights)), layout="constrained")
    rows = figure.subplots(len(grids), columns, squeeze=False, height_ratios=heights)
    for (key, roles), panels in zip(grids.items(), rows, strict=True):
        ours, canonical = roles["ours"], roles.get("canonical", {})
        where = f"H={key[0]}, {key[1]}" + (f", {key[2]} ranks" if key[2] > 1 else "")
        wrong = {at for at, r in ours.items() if r.status == "wrong"}
        over_floor = {at: r.ratio for at, r in ours.items()}
        _heat(panels[0], over_floor, wrong, f"time over the floor, {where}", "YlOrRd")
        if columns == 2:
            faster = {
                at: _over(canonical[at].p50_ms, r.p50_ms) if at in canonical else None
                for at, r in ours.items()
            }
            _heat(panels[1], faster, wrong, f"times faster than canonical, {where}", "YlGn")
    return _titled(figure, "The loss without gradients")


def mark_products(line: Callable[..., Any]) -> None:
    """Draw a reference line for three and for four products over three, by axvline or axhline."""
    line(1.0, color="black", linewidth=1)
    line(4 / 3, color="black", linewidth=0.8, linestyle=":")


def _missing(records: list[Record]) -> str:
    names = sorted({r.impl for r in records if r.not_installed})
    return f"\nnot installed: {', '.join(names)}" if names else ""


def _with_gradients(records: Iterable[Record]) -> dict[Shape, list[Record]]:
    """Group what was installed by shape, floors too; a shape with floors alone drops out."""
    shapes: dict[Shape, list[Record]] = {}
    for r in records:
        if r.mode == "forward_backward" and not r.not_installed:
            shapes.setdefault((*r.shape, r.P), []).append(r)
    return {s: found for s, found in shapes.items() if any(r.op != "floor" for r in found)}


def _over_products(found: list[Record]) -> list[tuple[Record, float]]:
    """Return each run with the time of three products at its shape; [] if that is not known."""
    products = next((r.p50_ms for r in found if r.impl == "gemm3"), None)
    if products is None:
        return []
    return [(r, products) for r in found if r.op != "floor"]


def _panels(shapes: dict[Shape, list[Item]]) -> tuple[Figure | None, list[tuple[Axes, list[Item]]]]:
    """Return a figure with a panel for each shape, above each other, and the runs of each."""
    if not shapes:
        return None, []
    heights = [0.6 + 0.25 * len(found) for found in shapes.values()]
    figure = Figure(figsize=(8.0, 0.9 + sum(heights)), layout="constrained")
    stacked = figure.subplots(len(shapes), 1, squeeze=False, height_ratios=heights)[:, 0]
    for shape, axes in zip(shapes, stacked, strict=True):
        axes.set_title(_name(shape), fontsize=9, loc="left")
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


def _heat(
    axes: Axes,
    values: dict[tuple[int, int], float | None],
    wrong: set[tuple[int, int]],
    title: str,
    colors: str,
) -> None:
    """Draw a table of numbers over T (down) and V (across), coloured by value."""
    Ts, Vs = sorted({T for T, _ in values}), sorted({V for _, V in values})
    cells = np.full((len(Ts), len(Vs)), np.nan)
    for (T, V), value in values.items():
        if value is not None:
            cells[Ts.index(T), Vs.index(V)] = value
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(Vs)), [f"{V}" for V in Vs], fontsize=8)
    axes.set_yticks(range(len(Ts)), [f"{T}" for T in Ts], fontsize=8)
    axes.set_xlabel("vocabulary", fontsize=8)
    axes.set_ylabel("tokens", fontsize=8)
    # Colours from 1: what is as fast as the floor, or as canonical, is pale.
    highest = np.nanmax(cells) if np.isfinite(cells).any() else 1.0
    axes.imshow(cells, cmap=colors, vmin=1.0, vmax=max(1.5, 1.3 * highest), aspect="auto")
    for T, V in values:
        y, x = Ts.index(T), Vs.index(V)
        text = "" if np.isnan(cells[y, x]) else f"{cells[y, x]:.2f}"
        if (T, V) in wrong:
            text += " wrong"
        axes.text(x, y, text, ha="center", va="center", fontsize=8)


def _over(ms: float | None, other_ms: float | None) -> float | None:
    return None if ms is None or other_ms is None else ms / other_ms


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _name(shape: Shape) -> str:
    T, H, V, dtype, P = shape
    return f"T={T}, H={H}, V={V}, {dtype}" + (f", {P} ranks" if P > 1 else "")


def _titled(figure: Figure | None, title: str) -> Figure | None:
    if figure is not None:
        figure.suptitle(title, fontsize=10)
    return figure
