"""A picture of how time and memory go with the number of ranks: the same grid run on several.

T, H and V (the whole vocabulary) stay as they are while P, the number of ranks, grows, so that each
rank has V / P rows. Efficiency is the time on the fewest ranks over the time on P of them, times
how many more these are: 100 % on the dotted line.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flce_dist.launch.bench_config import OURS
from flce_dist.launch.bench_report import Record

FLOOR = "gemm3"

OverRanks = dict[int, Record]  # by P
Problem = tuple[int, int, int, str]  # T, H, V, dtype


def scaling(records: list[Record]) -> Figure | None:
    """Draw time and memory against P for each run with gradients; None if there is one P only."""
    problems: dict[Problem, dict[str, OverRanks]] = {}
    for r in records:
        floor = r.op == "floor"
        if r.mode == "forward_backward" and r.p50_ms is not None and (not floor or r.impl == FLOOR):
            problems.setdefault(r.shape, {}).setdefault(r.run.name, {})[r.P] = r
    for problem, runs in problems.items():
        problems[problem] = {name: over for name, over in runs.items() if len(over) > 1}
    problems = {problem: runs for problem, runs in problems.items() if runs}
    if not problems:
        return None
    figure = Figure(figsize=(11.0, 0.6 + 3.6 * len(problems)), layout="constrained")
    rows = figure.subplots(len(problems), 2, squeeze=False, width_ratios=(1.0, 1.0))
    for ((T, H, V, dtype), runs), (times, memory) in zip(problems.items(), rows, strict=True):
        times.set_title(f"T={T}, H={H}, V={V}, {dtype}", fontsize=9, loc="left")
        for i, (name, over) in enumerate(sorted(runs.items(), key=_floor_first)):
            _draw(times, memory, name, over, f"C{i}")
        times.set_ylabel("time of forward and backward, ms", fontsize=8)
        memory.set_ylabel("MiB at the peak, beyond inputs and gradients", fontsize=8)
        counts = sorted({P for over in runs.values() for P in over})
        for axes in (times, memory):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.set_xticks(counts, [str(P) for P in counts])
            axes.set_xlabel("ranks", fontsize=8)
            axes.tick_params(labelsize=8)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        times.legend(fontsize=7, title="efficiency on more ranks", title_fontsize=7)
    figure.suptitle("The same problem on more ranks; dotted: in proportion", fontsize=10)
    return figure


def efficiency(over: OverRanks) -> dict[int, float]:
    """Return the share of the ranks that is put to use, for each P beyond the least."""
    least, *more = sorted(over)
    work_ms = least * (over[least].p50_ms or 0.0)
    return {P: work_ms / (P * (over[P].p50_ms or float("nan"))) for P in more}


def _draw(times: Axes, memory: Axes, name: str, over: OverRanks, color: str) -> None:
    counts = sorted(over)
    style = "o-" if over[counts[0]].impl in OURS else "s--"
    if name == FLOOR:
        color, style = "black", "-"
    shares = ", ".join(f"{share:.0%}" for share in efficiency(over).values())
    measured = [over[P].p50_ms or float("nan") for P in counts]
    times.plot(counts, measured, style, color=color, markersize=4, label=f"{name}: {shares}")
    linear = [measured[0] * counts[0] / P for P in counts]
    times.plot(counts, linear, ":", color=color, linewidth=1.0)
    mib = {P: over[P].workspace_mib for P in counts}
    known = {P: max(value, 1.0) for P, value in mib.items() if value is not None}
    if known:
        memory.plot(list(known), list(known.values()), style, color=color, markersize=4)


def _floor_first(item: tuple[str, OverRanks]) -> tuple[bool, bool]:
    """Order: the floor, ours, the others; among each as the files have them."""
    name, over = item
    return name != FLOOR, all(r.impl not in OURS for r in over.values())
