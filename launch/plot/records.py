"""Pictures of one file's records: the memory of every run, and memory against time.

Both are of runs with gradients, shape by shape, in the order of the file.
"""

from collections.abc import Iterable
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import OURS
from flce_dist.launch.bench.report import MIB, Record
from flce_dist.launch.plot.drawing import BLUE, ON_LINES, OUR_COLOR, WORKSPACE, mark_gemms, panels

Shape = tuple[int, int, int, str, int]  # T, H, V, dtype, P

PEER_COLOR, EDGE = "#b0b0b0", "#c0392b"
LEAST_MIB = 1.0
"""Where the axis starts: a logarithm has no place for 0."""


def memory(records: list[Record]) -> Figure | None:
    """Draw the memory beyond inputs and gradients, as bars.

    Wrong results are hatched, a failed run shows its message instead of a bar, and what was not
    installed is listed below.
    """
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


def dial(records: list[Record]) -> Figure | None:
    """Draw time against the budget of schedule auto, with recompute and cached at the ends."""
    curves: dict[Shape, dict[float, float]] = {}
    ends: dict[Shape, dict[str, float]] = {}
    for shape, found in with_gradients(records).items():
        gemms_ms = next((r.p50_ms for r in found if r.impl == "gemm3"), None)
        for r in found:
            if gemms_ms is None or r.p50_ms is None or r.impl not in OURS:
                continue
            value = r.p50_ms / gemms_ms
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
        axes.set_title(shape_title(shape), fontsize=9, loc="left")
        _dial(axes, curve, ends.get(shape, {}))
    figure.suptitle("Memory against time: the budget of schedule auto", fontsize=10)
    return figure


def _dial(axes: Axes, curve: dict[float, float], ends: dict[str, float]) -> None:
    """Draw one shape's ``curve``, time over three GEMMs by budget in MiB."""
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
    mark_gemms(axes.axhline)
    right = axes.get_yaxis_transform()
    for ratio, text in (
        (1.0, "3 matrix products"),
        (4 / 3, "4 matrix products: logits computed twice"),
    ):
        axes.annotate(
            text, (0.99, ratio), (0, -3), right, "offset points",
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


def with_gradients(records: Iterable[Record]) -> dict[Shape, list[Record]]:
    """Group what was installed by shape, floors too; a shape with floors alone drops out."""
    shapes: dict[Shape, list[Record]] = {}
    for r in records:
        if r.mode == "forward_backward" and not r.not_installed:
            shapes.setdefault((*r.shape, r.P), []).append(r)
    return {s: found for s, found in shapes.items() if any(r.op != "floor" for r in found)}


def shape_title(shape: Shape) -> str:
    T, H, V, dtype, P = shape
    return f"T={T}, H={H}, V={V}, {dtype}" + (f", {P} ranks" if P > 1 else "")
