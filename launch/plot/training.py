"""Several training runs of one model: losses over steps, tokens per second, peak memory."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

SMOOTHED = 25
"""Steps over which the training loss is averaged."""
COLORS = (
    "#2c7fb8", "#41b6c4", "#d95f0e", "#969696", "#f4a582", "#636363",
    "#253494", "#993404", "#74c476", "#c994c7",
)  # fmt: skip


def is_training(content: dict[str, Any]) -> bool:
    """Whether this is the content of a file of training runs."""
    return {"about", "runs"} <= content.keys()


def training_figure(runs: dict[str, dict[str, Any]]) -> Figure:
    """Draw the loss of all runs, its difference from the first Megatron run's, and their costs."""
    figure = Figure(figsize=(9.5, 6.6), layout="constrained")
    rows = figure.subplot_mosaic(
        [["loss", "difference"], ["speed", "memory"]], height_ratios=[2.2, 0.3 + 0.17 * len(runs)]
    )
    baseline = next((label for label in runs if label.startswith("Megatron")), next(iter(runs)))
    reference = smoothed(runs[baseline], "loss")
    for (label, run), color in zip(runs.items(), COLORS * len(runs), strict=False):
        means = smoothed(run, "loss")
        rows["loss"].plot(*points(means), color=color, linewidth=1.2, label=label)
        rows["loss"].plot(*points(validation(run)), "o", color=color, markersize=3.5)
        if label != baseline:
            gaps = differences(means, reference)
            rows["difference"].plot(*points(gaps), color=color, linewidth=1.2)
    rows["loss"].set_ylabel("loss (nats per token)", fontsize=8)
    rows["loss"].set_title(
        f"Training loss (mean of {SMOOTHED} steps); dots: validation", fontsize=9, loc="left"
    )
    rows["loss"].legend(fontsize=8, frameon=False)
    rows["difference"].axhline(0.0, color="black", linewidth=0.8)
    rows["difference"].set_title(f"Difference from: {baseline}", fontsize=9, loc="left")
    for name in ("loss", "difference"):
        rows[name].set_xlabel("step", fontsize=8)
        rows[name].grid(alpha=0.3)
    _bars(rows["speed"], runs, "tokens_per_s", "tokens per second (median)")
    _bars(rows["memory"], runs, "peak_mib", "peak memory of a GPU, MiB")
    rows["memory"].set_yticklabels([])
    for axes in rows.values():
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(model_title(runs), fontsize=10)
    return figure


def model_title(runs: dict[str, dict[str, Any]]) -> str:
    """Name the model and the layout, which all runs share."""
    config = next(iter(runs.values()))["config"]
    layers, hidden, dtype, tensor = (
        config[key]
        for key in ("model.num_layers", "model.hidden_size", "model.dtype", "parallel.tensor")
    )
    parallel = f", tensor-parallel {tensor}" if tensor > 1 else ""
    untied = "" if config["model.tie_embeddings"] else ", untied"
    return f"GPT of {layers} layers, hidden {hidden}, {dtype}{untied}{parallel}"


def _bars(axes: Axes, runs: dict[str, dict[str, Any]], key: str, label: str) -> None:
    values = [run[key] or 0 for run in runs.values()]
    colors = (COLORS * len(runs))[: len(runs)]
    bars = axes.barh(list(runs), values, height=0.65, color=colors)
    shown = [f"{value:,.0f}" if value else "" for value in values]
    axes.bar_label(bars, shown, padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(label, fontsize=8)


Curve = dict[float, float]
"""Values by step."""


def smoothed(run: dict[str, Any], key: str) -> Curve:
    """Return means over SMOOTHED steps, or over those of one point, by their middle step."""
    values, each = run[key], run.get("steps_per_point", 1)
    size, means = max(1, SMOOTHED // each), {}
    for start in range(0, len(values), size):
        part = values[start : start + size]
        known = [x for x in part if x is not None and math.isfinite(x)]
        if known:
            means[start * each + (len(part) * each + 1) / 2] = sum(known) / len(known)
    return means


def validation(run: dict[str, Any]) -> Curve:
    return {step: loss for step, loss in run["validation"] if loss is not None}


def differences(mine: Curve, other: Curve) -> Curve:
    """Return where ``mine`` lies above ``other``, at the steps of both."""
    return {step: mine[step] - other[step] for step in mine if step in other}


def points(curve: Curve) -> tuple[list[float], list[float]]:
    return list(curve), list(curve.values())
