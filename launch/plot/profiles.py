"""Pictures of the benchmark's profiles: one call of each run in time."""

from matplotlib.figure import Figure

from flce_dist.launch.bench.files import ProfiledRun
from flce_dist.launch.bench.floors import FLOORS
from flce_dist.launch.bench.profiles import Kind
from flce_dist.launch.plot.drawing import panels

COLORS = {"products": "#2c7fb8", "other": "#7fcdbb", "communication": "#d95f0e"}
PARTS: dict[Kind, str] = {
    "products": "matrix products",
    "other": "other kernels",
    "communication": "communication",
}


def timeline(found: list[ProfiledRun]) -> Figure | None:
    """Draw one call of each run: computing above, communication below; None without time lines."""
    shapes: dict[str, list[ProfiledRun]] = {}
    for x in found:
        if x.profile.timeline and x.run not in FLOORS:
            shapes.setdefault(x.shape, []).append(x)
    figure, stacked = panels(shapes, width=9.0, height=0.6)
    if figure is None:
        return None
    for axes, runs in stacked:
        for y, x in enumerate(runs):
            for kind, start_us, end_us in x.profile.timeline:
                row, edge = (0.2, COLORS[kind]) if kind == "communication" else (-0.2, "dimgray")
                axes.barh(  # a short one is little more than its edge
                    y + row, (end_us - start_us) / 1e3, left=start_us / 1e3, height=0.36,
                    color=COLORS[kind], edgecolor=edge, linewidth=0.2 if row < 0 else 0.8,
                )  # fmt: skip
        for kind, label in PARTS.items():
            axes.barh(0, 0, color=COLORS[kind], label=label)
        last = max(end_us for x in runs for _, _, end_us in x.profile.timeline) / 1e3
        axes.set_xlim(0, 1.02 * last)
        axes.set_xlabel("ms", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_yticks(range(len(runs)), [x.run for x in runs], fontsize=8)
        axes.set_ylim(len(runs) - 0.5, -0.5)
        for y in range(1, len(runs)):
            axes.axhline(y - 0.5, color="lightgray", linewidth=0.6)
    handles, labels = stacked[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=7)
    title = "One call on rank 0: computing, and communication below it"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure
