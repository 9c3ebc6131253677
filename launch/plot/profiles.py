"""Pictures of the benchmark's profiles: what a call's time went to, and one call in time.

Each is a function of what ``read_profiles`` returns; None where no run has a time line.
"""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.floors import FLOORS
from flce_dist.launch.bench.profiles import Profile

COLORS = {"products": "#2c7fb8", "other": "#7fcdbb", "communication": "#d95f0e", "idle": "#f0f0f0"}
PARTS = {
    "products": "matrix products",
    "other": "other kernels",
    "communication": "exposed communication",
    "idle": "idle",
}


@dataclass(frozen=True)
class ProfiledRun:
    """``shape`` as a title says it."""

    shape: str
    run: str
    profile: Profile


def breakdown(found: list[ProfiledRun]) -> Figure | None:
    """Draw a bar for each run: products, other kernels, exposed communication and idle time."""
    figure, panels = _panels([x for x in found if x.profile.step_us is not None], height=0.28)
    for axes, runs in panels:
        longest = max(x.profile.step_us or 0.0 for x in runs) / 1e3
        for y, x in enumerate(runs):
            start = 0.0
            for part, part_us in _parts(x.profile).items():
                axes.barh(
                    y, part_us / 1e3, left=start, height=0.7, color=COLORS[part],
                    edgecolor="dimgray", linewidth=0.4, label=PARTS[part] if y == 0 else None,
                )  # fmt: skip
                start += part_us / 1e3
            text = f"  {start:.2f}"
            if x.profile.comm_us:
                exposed = (x.profile.exposed_comm_us or 0.0) / 1e3
                text += f", {exposed:.2f} of {x.profile.comm_us / 1e3:.2f} exposed"
            axes.text(start, y, text, va="center", fontsize=7)
        axes.set_xlim(0, 1.35 * longest)
        axes.set_yticks(range(len(runs)), [x.run for x in runs], fontsize=8)
        axes.set_ylim(len(runs) - 0.5, -0.5)
    return _titled(figure, panels, "Where the time of a call goes")


def timeline(found: list[ProfiledRun]) -> Figure | None:
    """Draw one call of each run: computing above, communication below it."""
    shown = [x for x in found if x.profile.timeline and x.run not in FLOORS]
    figure, panels = _panels(shown, height=0.6)
    for axes, runs in panels:
        for y, x in enumerate(runs):
            for kind, start_us, end_us in x.profile.timeline:
                row, edge = (0.2, COLORS[kind]) if kind == "communication" else (-0.2, "dimgray")
                axes.barh(  # a short one is little more than its edge
                    y + row, (end_us - start_us) / 1e3, left=start_us / 1e3, height=0.36,
                    color=COLORS[kind], edgecolor=edge, linewidth=0.2 if row < 0 else 0.8,
                )  # fmt: skip
        for kind in ("products", "other", "communication"):
            label = PARTS[kind].removeprefix("exposed ")
            axes.barh(0, 0, color=COLORS[kind], label=label)
        last = max(end_us for x in runs for _, _, end_us in x.profile.timeline) / 1e3
        axes.set_xlim(0, 1.02 * last)
        axes.set_yticks(range(len(runs)), [x.run for x in runs], fontsize=8)
        axes.set_ylim(len(runs) - 0.5, -0.5)
        for y in range(1, len(runs)):
            axes.axhline(y - 0.5, color="lightgray", linewidth=0.6)
    return _titled(figure, panels, "One call on rank 0: computing, and communication below it")


def _parts(profile: Profile) -> dict[str, float]:
    return {
        "products": profile.products_us or 0.0,
        "other": profile.other_us or 0.0,
        "communication": profile.exposed_comm_us or 0.0,
        "idle": profile.idle_us or 0.0,
    }


def _panels(
    found: list[ProfiledRun], height: float
) -> tuple[Figure | None, list[tuple[Axes, list[ProfiledRun]]]]:
    """Return a figure with a panel for each shape, ``height`` inches for each of its runs."""
    shapes: dict[str, list[ProfiledRun]] = {}
    for x in found:
        shapes.setdefault(x.shape, []).append(x)
    if not shapes:
        return None, []
    heights = [0.8 + height * len(runs) for runs in shapes.values()]
    figure = Figure(figsize=(9.0, 0.8 + sum(heights)), layout="constrained")
    stacked = figure.subplots(len(shapes), 1, squeeze=False, height_ratios=heights)[:, 0]
    for shape, axes in zip(shapes, stacked, strict=True):
        axes.set_title(shape, fontsize=9, loc="left")
        axes.set_xlabel("ms", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(zip(stacked, shapes.values(), strict=True))


def _titled(
    figure: Figure | None, panels: list[tuple[Axes, list[ProfiledRun]]], title: str
) -> Figure | None:
    if figure is not None:
        axes, _ = panels[0]
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=7)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure
