"""Draw what the benchmark wrote. Reads result files and nothing else.

    python -m flce_dist.launch.plot runs/bench/peers.json runs/bench/dial.json --out runs/figures

A file name.json gives the figures that its records are enough for: name-memory.png, name-dial.png,
name-shares.png and name-best.png. Files of one kind of GPU that have other implementations beside
ours give first_name-overview.png. A profile, name.profile.json, gives name-timeline.png, and files
of one grid, commit and kind of GPU on different numbers of ranks give first_name-scaling.png.
"""

from flce_dist.launch.program import run_program  # isort: skip  # before other packages

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from flce_dist.launch.about import caption
from flce_dist.launch.bench.files import read_profiles, read_results
from flce_dist.launch.plot.figures import best, dial, memory, shares, timeline
from flce_dist.launch.plot.overview import overview
from flce_dist.launch.plot.scaling import ResultFile, one_grid, scaling
from flce_dist.launch.write import write_figure
from flce_dist.launch.yaml_config import check_values, require

PROFILE = ".profile"
"""How the stem of a profile ends."""
FIGURES = {"memory": memory, "dial": dial, "shares": shares, "best": best}


@dataclass(frozen=True)
class Settings:
    results: tyro.conf.Positional[tuple[Path, ...]]
    """JSON files of flce_dist.launch.bench."""
    out: Path = Path("runs/figures")
    """Folder for the figures."""


def main(args: list[str] | None = None) -> int:
    """Return 0 if every file could be read."""
    check_values(sys.argv[1:] if args is None else args)
    settings = tyro.cli(
        Settings, prog="python -m flce_dist.launch.plot", args=args, description=__doc__
    )
    require(bool(settings.results), "results must name at least one file, got none")
    drawn = draw(list(settings.results), settings.out)
    for path in drawn:
        print(path)
    for path in settings.results:
        if set(drawn).isdisjoint(_own_figures(path, settings.out).values()):
            print(f"{path}: has no records that a figure shows")
    return 0


def _own_figures(path: Path, out: Path) -> dict[str, Path]:
    """Return figures that a file may have alone, by kind; one that is in others has some of these.

    They are a timeline of a profile, and ``FIGURES`` of records.
    """
    if path.stem.endswith(PROFILE):
        return {"timeline": out / f"{path.stem.removesuffix(PROFILE)}-timeline.png"}
    return {kind: out / f"{path.stem}-{kind}.png" for kind in FIGURES}


Figures = dict[Path, tuple[Figure | None, list[dict[str, Any]]]]
"""By their paths, with ``about`` of each file shown; None where records are not enough."""


def draw(results: list[Path], out: Path) -> list[Path]:
    """Write the figures of each result file; return their paths."""
    stems = [path.stem for path in results]
    require(len(set(stems)) == len(stems), f"results must have names of their own, got {stems}")
    figures: Figures = {}
    by_hardware: dict[str, list[ResultFile]] = {}
    for path in results:
        if path.stem.endswith(PROFILE):
            figures |= _timeline_of(path, out)
            continue
        about, records = read_results(path)
        by_hardware.setdefault(str(about.get("hardware")), []).append((path, about, records))
        for kind, own in _own_figures(path, out).items():
            figures[own] = FIGURES[kind](records), [about]
    for files in by_hardware.values():
        figures |= _scaling_of(files, out)
    for files in by_hardware.values():
        figures |= _overview_of(files, out)
    return _written(figures)


def _timeline_of(path: Path, out: Path) -> Figures:
    about, profiles = read_profiles(path)
    ranks = about.get("ranks", 1)
    if ranks > 1:
        profiles = [x._replace(shape=f"{x.shape}, {ranks} ranks") for x in profiles]
    return {_own_figures(path, out)["timeline"]: (timeline(profiles), [about])}


def _scaling_of(files: list[ResultFile], out: Path) -> Figures:
    """Return the figure of those files that have one grid on several numbers of ranks."""
    alike = one_grid(files)
    if not alike:
        return {}
    figure = scaling([record for _, _, records in alike for record in records])
    return {out / f"{alike[0][0].stem}-scaling.png": (figure, [about for _, about, _ in alike])}


def _overview_of(files: list[ResultFile], out: Path) -> Figures:
    """Return the figure of files of one kind of GPU together."""
    figure = overview([records for _, _, records in files])
    return {out / f"{files[0][0].stem}-overview.png": (figure, [about for _, about, _ in files])}


def _written(figures: Figures) -> list[Path]:
    """Write the figures that there are, each over what it holds for; return their paths."""
    drawn = {path: (figure, shown) for path, (figure, shown) in figures.items() if figure}
    for path, (figure, shown) in drawn.items():
        below = caption(shown, figure.get_figwidth())
        figure.supxlabel(below, fontsize=7, color="dimgray")
        write_figure(path, figure, dpi=130)
    return list(drawn)


if __name__ == "__main__":
    run_program(main)
