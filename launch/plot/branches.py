"""Differences of validation losses between branches of one training run."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flce_dist.launch.bench.branch_records import Branch, Difference, differences, gaps
from flce_dist.launch.plot.drawing import finish
from flce_dist.launch.plot.filtered_runs import DROPPED_COLORS, FILTERED_COLORS, band_names
from flce_dist.launch.plot.training import model_title

EXACT_COLORS = ("#969696", "#c51b8a")


def is_branches(content: dict[str, Any]) -> bool:
    """Whether this is the content of a file of launch.bench.branches."""
    return {"about", "branches"} <= content.keys()


def branches_figure(content: dict[str, Any]) -> Figure | None:
    """Draw differences from exact over steps, and the last ones by frequency of the label.

    If there are dropped tiles the others are drawn over steps once more. None if no stretch has
    exact and another.
    """
    about, branches = content["about"], [Branch(**entry) for entry in content["branches"]]
    colors = _colors(list(gaps(branches)))
    if not colors:
        return None
    near = {head: color for head, color in colors.items() if _kind(head) != "dropped"}
    panels = [colors] if near in (colors, {}) else [colors, near]
    bands = branches[0].by_frequency
    count = len(panels) + bool(bands)
    figure = Figure(figsize=(2.8 + 3.4 * count, 3.8), layout="constrained")
    all_axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axes, shown in zip(all_axes, panels, strict=False):
        _draw_steps(axes, branches, shown)
    first, *others = all_axes[: len(panels)]
    first.legend(fontsize=8, frameon=False)
    first.set_ylabel("nats per token", fontsize=8)
    first.set_title("Validation loss minus exact", fontsize=9, loc="left")
    for axes in others:
        axes.set_title("Without dropped tiles", fontsize=9, loc="left")
    if bands:
        _draw_bands(all_axes[-1], branches, near or colors)
    model = model_title({"": about})
    figure.suptitle(f"{model}: branches from step {about['step']}", fontsize=10)
    return figure


def _draw_steps(axes: Axes, branches: list[Branch], colors: dict[str, str]) -> None:
    """Draw each stretch as a thin line, and means with standard errors, side by side."""
    stretches = gaps(branches)
    means = [each for each in differences(branches) if each.labels_from is None]
    steps = sorted({each.step for each in means})
    apart = 0.12 * steps[0]
    for i, (head, color) in enumerate(colors.items()):
        for gap in stretches[head].values():
            axes.plot([0, *gap], [0.0, *gap.values()], color=color, linewidth=0.6, alpha=0.5)
        mine = [each for each in means if each.head == head]
        shift = apart * (i - (len(colors) - 1) / 2)
        _draw_means(axes, [each.step + shift for each in mine], mine, color)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    counts = {each.n for each in means if each.head in colors}
    n = " to ".join(str(n) for n in sorted({min(counts), max(counts)}))
    axes.set_xlabel(f"steps; mean and standard error of {n} stretches of text", fontsize=8)
    _finish(axes)


def _draw_bands(axes: Axes, branches: list[Branch], colors: dict[str, str]) -> None:
    """Draw means with standard errors by frequency of the label, at the last step."""
    bands = branches[0].by_frequency
    begins = [band["from"] for band in bands]
    means = [each for each in differences(branches) if each.labels_from is not None]
    for i, (head, color) in enumerate(colors.items()):
        mine = [each for each in means if each.head == head]
        shift = 0.5 * ((i + 0.5) / len(colors) - 0.5)
        places = [begins.index(each.labels_from) + shift for each in mine]
        _draw_means(axes, places, mine, color)
    axes.set_xticks(range(len(bands)), band_names(begins, [band["tokens"] for band in bands]))
    axes.set_xlabel("place of the label by frequency, share of labels", fontsize=8)
    axes.set_title(f"After {branches[0].steps[-1]} steps", fontsize=9, loc="left")
    _finish(axes)


def _draw_means(axes: Axes, places: list[float], means: list[Difference], color: str) -> None:
    axes.errorbar(
        places,
        [each.mean for each in means],
        [each.standard_error or 0.0 for each in means],
        color=color, fmt="o", markersize=4, linewidth=1.2, capsize=2.5, label=means[0].head,
    )  # fmt: skip


def _finish(axes: Axes) -> None:
    axes.axhline(0.0, color="black", linewidth=0.8)
    finish(axes)


def _colors(heads: list[str]) -> dict[str, str]:
    colors = {"exact": EXACT_COLORS, "filtered": FILTERED_COLORS, "dropped": DROPPED_COLORS}
    left = {kind: iter(some * len(heads)) for kind, some in colors.items()}
    return {head: next(left[_kind(head)]) for head in heads}


def _kind(head: str) -> str:
    """Return the first word of "filtered, 2^-12" and the like."""
    return head.partition(",")[0]
