"""Draw what the benchmark wrote. Reads result files and nothing else.

    python -m flce_dist.launch.plot runs/bench/peers.json runs/bench/dial.json --out runs/figures

Of each file ``<name>.json`` come the figures that its records are enough for:
``<name>-latency.png``, ``-memory.png``, ``-dial.png`` and ``-forward.png``. Of a profile,
``<name>.profile.json``, come ``<name>-breakdown.png`` and ``<name>-timeline.png``. Files of one
grid, one commit and one kind of GPU on different numbers of ranks together give
``<first name>-scaling.png``. Training runs, collected by ``flce_dist.launch.train.results``, give
``<name>-training.png``, and ``<name>-filtered.png`` if some filter gradients. A file of
``flce_dist.launch.bench.branches`` gives ``<name>-difference.png``. A file of
``flce_dist.launch.bench.filtered`` gives ``<name>-time.png``, and together with such runs
``<name of the runs>-overview.png``.
"""

from flce_dist.launch.program import run_program  # isort: skip  # before other packages

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from flce_dist.launch.about import caption
from flce_dist.launch.bench.files import read_profiles, read_results
from flce_dist.launch.plot.bars import latency, memory
from flce_dist.launch.plot.branches import branches_figure, is_branches
from flce_dist.launch.plot.dial import dial
from flce_dist.launch.plot.filtered_runs import filtered_figure, overview
from flce_dist.launch.plot.filtered_times import is_filtered_times, times_figure
from flce_dist.launch.plot.forward_grid import forward_grid
from flce_dist.launch.plot.profiles import ProfiledRun, breakdown, timeline
from flce_dist.launch.plot.scaling import ResultFile, one_grid, scaling
from flce_dist.launch.plot.training import is_training, training_figure
from flce_dist.launch.write import write_figure
from flce_dist.launch.yaml_config import ConfigError

FIGURES = {"latency": latency, "memory": memory, "dial": dial, "forward": forward_grid}
PROFILE_FIGURES = {"breakdown": breakdown, "timeline": timeline}
PROFILE = ".profile"


@dataclass(frozen=True)
class Settings:
    results: tyro.conf.Positional[tuple[Path, ...]]
    """JSON files of flce_dist.launch.bench or flce_dist.launch.train.results."""
    out: Path = Path("runs/figures")
    """Folder for the figures."""


def main(args: list[str] | None = None) -> int:
    """Return 0 if every file could be read."""
    settings = tyro.cli(
        Settings, prog="python -m flce_dist.launch.plot", args=args, description=__doc__
    )
    if not settings.results:
        raise ConfigError("results must name at least one file, got none")
    for path in draw(list(settings.results), settings.out):
        print(path)
    return 0


def draw(results: list[Path], out: Path) -> list[Path]:
    """Write the figures of each result file; return their paths."""
    stems = [path.stem for path in results]
    if len(set(stems)) < len(stems):
        raise ConfigError(f"results must have names of their own, got {stems}")
    found: dict[Path, tuple[Figure | None, list[dict[str, Any]]]] = {}
    by_hardware: dict[str, list[ResultFile]] = {}
    trained: dict[Path, dict[str, Any]] = {}
    timed: list[dict[str, Any]] = []
    for path in results:
        if path.stem.endswith(PROFILE):
            about, profiles = read_profiles(path)
            runs = [ProfiledRun(_with_ranks(s, about), name, found) for s, name, found in profiles]
            figures: dict[str, Figure | None] = {
                name: figure_of(runs) for name, figure_of in PROFILE_FIGURES.items()
            }
        elif is_training(content := _content(path)):
            about, runs_of = content["about"], content["runs"]
            figures = {"training": training_figure(runs_of), "filtered": filtered_figure(runs_of)}
            trained[path] = content
        elif is_branches(content):
            about, figures = content["about"], {"difference": branches_figure(content)}
        elif is_filtered_times(content):
            about, figures = content["about"], {"time": times_figure(content["records"])}
            timed.append(content)
        else:
            about, records = read_results(path)
            figures = {name: figure_of(records) for name, figure_of in FIGURES.items()}
            by_hardware.setdefault(str(about.get("hardware")), []).append((path, about, records))
        for name, figure in figures.items():
            found[out / f"{_name(path)}-{name}.png"] = figure, [about]
    for alike in map(one_grid, by_hardware.values()):
        if alike:
            path, about, _ = alike[0]
            figure = scaling([record for _, _, records in alike for record in records])
            found[out / f"{_name(path)}-scaling.png"] = figure, [{**about, "ranks": 1}]
    for path, training in trained.items():
        for times in timed:
            figure = overview(times["records"], training["runs"])
            found[out / f"{_name(path)}-overview.png"] = figure, [times["about"], training["about"]]
    drawn = [(path, figure, abouts) for path, (figure, abouts) in found.items() if figure]
    for path, figure, abouts in drawn:
        captions = dict.fromkeys(caption(about, figure.get_figwidth()) for about in abouts)
        sides = ("left: ", "right: ") if len(captions) > 1 else ("",)
        below = "\n".join(map("".join, zip(sides, captions, strict=True)))
        figure.supxlabel(below, fontsize=7, color="dimgray")
        write_figure(path, figure, dpi=130)
    return [path for path, *_ in drawn]


def _content(path: Path) -> dict[str, Any]:
    """Return a file's content, {} if it is no JSON object; ``read_results`` names that mistake."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _name(path: Path) -> str:
    return path.stem.removesuffix(PROFILE)


def _with_ranks(shape: str, about: dict[str, Any]) -> str:
    ranks = about.get("ranks", 1)
    return f"{shape}, {ranks} ranks" if ranks > 1 else shape


if __name__ == "__main__":
    run_program(main)
