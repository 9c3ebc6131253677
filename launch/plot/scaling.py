"""Time and memory over the number of ranks: the same grid run on several.

T, H and V (the whole vocabulary) are fixed while P, the number of ranks, grows. Each run has a row,
and each P a marker in it. Efficiency is the time of all ranks together on the fewest ranks, over
that on P: at 100 % the markers of a row are aligned.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench.config import ShapeSpec
from flce_dist.launch.bench.report import Record
from flce_dist.launch.plot import figures
from flce_dist.launch.yaml_config import require

FLOOR = "gemm3"
MARKERS = ("o", "s", "D", "^", "v")
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#000000")
"""Of Okabe and Ito, which colour-blind readers tell apart."""

ResultFile = tuple[Path, dict[str, Any], list[Record]]
OverRanks = dict[int, Record]  # by P


def one_grid(files: list[ResultFile]) -> list[ResultFile]:
    """Return the files that have a run in common with one on another number of ranks.

    Raises ``ConfigError`` if they are of different commits.
    """
    ranks_of: dict[Any, set[int]] = defaultdict(set)  # of each run
    for _, about, records in files:
        for run in _runs(records):
            ranks_of[run].add(about.get("ranks", 1))
    with_ranks = [file for file in files if any(len(ranks_of[run]) > 1 for run in _runs(file[2]))]
    names = [f"{path.name} of {about.get('commit')}" for path, about, _ in with_ranks]
    require(
        len({about.get("commit") for _, about, _ in with_ranks}) <= 1,
        "results of one grid on several numbers of ranks must be of one commit to be compared, "
        f"got {', '.join(names)}; draw those of each commit by a command of their own",
    )
    return with_ranks


def scaling(records: list[Record]) -> Figure | None:
    """Draw time and memory on each P for each run with gradients; None if there is one P only."""
    problems: dict[ShapeSpec, dict[str, OverRanks]] = {}
    for r in filter(_is_drawn, records):
        problems.setdefault(r.shape, {}).setdefault(r.run.name, {})[r.P] = r
    for problem, runs in problems.items():
        problems[problem] = {name: over for name, over in runs.items() if len(over) > 1}
    problems = {problem: runs for problem, runs in problems.items() if FLOOR in runs}
    if not problems:
        return None
    counts = sorted({P for runs in problems.values() for over in runs.values() for P in over})
    heights = [0.7 + (0.1 + 0.14 * len(counts)) * len(runs) for runs in problems.values()]
    figure = Figure(figsize=(11.0, 1.2 + sum(heights)), layout="constrained")
    panels = figure.subplots(
        len(problems), 2, squeeze=False, sharex="col", sharey="row", height_ratios=heights
    )
    drawn = [r for runs in problems.values() for over in runs.values() for r in over.values()]
    least = figures.least_mib(drawn)
    for (shape, runs), (times, memory) in zip(problems.items(), panels, strict=True):
        times.set_title(shape.title, fontsize=9, loc="left")
        rows = sorted(runs.items(), key=lambda item: item[0] != FLOOR)  # the floor first
        _draw(times, memory, dict(rows), counts, least)
    times, memory = panels[-1]
    left, right = times.get_xlim()
    times.set_xlim(min(left, 0.95), right + 0.2 * (right - left))  # the widest has its percents
    gemms = "three GEMMs on the fewest (dotted: four)"
    times.set_xlabel(f"time x ranks over {gemms}; percent: of linear scaling", fontsize=8)
    memory.set_xscale("log", base=2)
    memory.xaxis.set_major_formatter("{x:,g}")
    memory.set_xlabel(f"{figures.WORKSPACE}, per rank", fontsize=8)
    markers = times.get_legend_handles_labels()
    figure.legend(*markers, loc="outside upper right", ncols=5, fontsize=8)
    figure.suptitle("The same problem on more ranks", fontsize=10, x=0.01, ha="left")
    return figure


def efficiency(over: OverRanks) -> dict[int, float]:
    """Return the share of the ranks that is put to use, for each P beyond the least."""
    least, *more = sorted(over)
    return {P: _rank_ms(over[least]) / _rank_ms(over[P]) for P in more}


def _draw(
    times: Axes, memory: Axes, runs: dict[str, OverRanks], counts: Sequence[int], least: float
) -> None:
    """Draw a row for each run, downwards, and in it a marker for each of ``counts`` ranks.

    Memory below ``least`` MiB is drawn there.
    """
    products_ms = _rank_ms(runs[FLOOR][min(runs[FLOOR])])
    for i, P in enumerate(counts):
        of_ranks = [(y, over[P]) for y, over in enumerate(runs.values()) if P in over]
        within = 0.6 * ((i + 0.5) / len(counts) - 0.5)
        style: dict[str, Any] = {"marker": MARKERS[i % 5], "color": COLORS[i % 5], "markersize": 5}
        label = f"{P} rank{'s' if P > 1 else ''}"
        costs = [_rank_ms(r) / products_ms for _, r in of_ranks]
        times.plot(costs, [y + within for y, _ in of_ranks], linestyle="none", label=label, **style)
        with_memory = [(y, r.workspace_mib) for y, r in of_ranks if r.workspace_mib is not None]
        mib = [max(value, least) for _, value in with_memory]
        memory.plot(mib, [y + within for y, _ in with_memory], linestyle="none", **style)
    for y, over in enumerate(runs.values()):
        shares = ", ".join(f"{share:.0%}" for share in efficiency(over).values())
        most = max(_rank_ms(r) for r in over.values()) / products_ms
        figures.write_at(times, shares, (most, y), (8, 0), va="center", fontsize=7)
    figures.mark_gemms(times.axvline)
    figures.name_rows(times, list(runs))
    for axes in (times, memory):
        axes.tick_params(labelsize=8)
        axes.grid(axis="x", alpha=0.3)
        for y in range(1, len(runs)):
            axes.axhline(y - 0.5, color="lightgray", linewidth=0.6)


def _rank_ms(r: Record) -> float:
    """Return the time of all ranks together."""
    return r.P * (r.p50_ms or float("nan"))


def _is_drawn(r: Record) -> bool:
    named = r.op != "floor" or r.impl == FLOOR
    return r.mode == "forward_backward" and r.p50_ms is not None and named


def _runs(records: list[Record]) -> set[Any]:
    """Return what is comparable with a run in another file; floors alone are not."""
    return {(r.shape, r.run.name) for r in records if _is_drawn(r) and r.op != "floor"}
