"""What the figures of the benchmark share: colours, labels, panels and reference lines."""

from collections.abc import Callable
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Item = TypeVar("Item")

OUR_COLOR = "#2c7fb8"
BLUE = "blue: linear_cross_entropy"
PRODUCTS = "3 matrix products; dotted: 4 products, logits computed twice"
WORKSPACE = "MiB at the peak, beyond inputs and gradients"
ON_LINES = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
"""Behind a text that reference lines may cross."""


def panels(
    shapes: dict[str, list[Item]], width: float, height: float
) -> tuple[Figure | None, list[tuple[Axes, list[Item]]]]:
    """Return a figure with a panel for each shape, ``height`` inches for each of its runs."""
    if not shapes:
        return None, []
    heights = [0.8 + height * len(found) for found in shapes.values()]
    figure = Figure(figsize=(width, 0.8 + sum(heights)), layout="constrained")
    stacked = figure.subplots(len(shapes), 1, squeeze=False, height_ratios=heights)[:, 0]
    for shape, axes in zip(shapes, stacked, strict=True):
        axes.set_title(shape, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(zip(stacked, shapes.values(), strict=True))


def mark_gemms(line: Callable[..., Any]) -> None:
    """Draw a reference line for three and for four GEMMs over three, by axvline or axhline."""
    line(1.0, color="black", linewidth=1)
    line(4 / 3, color="black", linewidth=0.8, linestyle=":")
