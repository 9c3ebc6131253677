"""The loss without gradients, as tables over tokens and vocabulary."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import OURS
from flce_dist.launch.bench.report import Record
from flce_dist.launch.plot.drawing import over, titled

Grid = dict[tuple[int, int], Record]  # by T and V


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
                at: over(canonical[at].p50_ms, r.p50_ms) if at in canonical else None
                for at, r in ours.items()
            }
            _heat(panels[1], faster, wrong, f"times faster than canonical, {where}", "YlGn")
    return titled(figure, "The loss without gradients")


def _heat(
    axes: Axes,
    values: dict[tuple[int, int], float | None],
    wrong: set[tuple[int, int]],
    title: str,
    colors: str,
) -> None:
    """Draw a table of numbers over T (down) and V (across), coloured by value."""
    Ts, Vs = sorted({T for T, _ in values}), sorted({V for _, V in values})
    numbers = np.full((len(Ts), len(Vs)), np.nan)
    for (T, V), value in values.items():
        if value is not None:
            numbers[Ts.index(T), Vs.index(V)] = value
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(Vs)), [f"{V}" for V in Vs], fontsize=8)
    axes.set_yticks(range(len(Ts)), [f"{T}" for T in Ts], fontsize=8)
    axes.set_xlabel("vocabulary", fontsize=8)
    axes.set_ylabel("tokens", fontsize=8)
    # Colours from 1: what is as fast as the floor, or as canonical, is pale.
    highest = np.nanmax(numbers) if np.isfinite(numbers).any() else 1.0
    axes.imshow(numbers, cmap=colors, vmin=1.0, vmax=max(1.5, 1.3 * highest), aspect="auto")
    for T, V in values:
        y, x = Ts.index(T), Vs.index(V)
        text = "" if np.isnan(numbers[y, x]) else f"{numbers[y, x]:.2f}"
        if (T, V) in wrong:
            text += " wrong"
        axes.text(x, y, text, ha="center", va="center", fontsize=8)
