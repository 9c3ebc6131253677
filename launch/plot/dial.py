"""Memory against time: the budget of schedule auto."""

from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import OURS
from flce_dist.launch.bench.report import Record
from flce_dist.launch.plot.drawing import (
    ON_LINES,
    OUR_COLOR,
    Shape,
    mark_gemms,
    shape_title,
    with_gradients,
)

MIB = 2**20


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
