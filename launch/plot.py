"""Draw what the benchmark wrote. Reads result files and nothing else.

    python -m flce_dist.launch.plot runs/bench/peers.json runs/bench/dial.json --out runs/figures

Of each file ``<name>.json`` come those of the pictures that its records are enough for:
``<name>-latency.png``, ``-memory.png``, ``-dial.png`` and ``-forward.png``.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from flce_dist.launch.bench_files import read_results
from flce_dist.launch.plot_figures import dial, forward_grid, latency, memory
from flce_dist.launch.yaml_config import ConfigError

FIGURES = {"latency": latency, "memory": memory, "dial": dial, "forward": forward_grid}


@dataclass(frozen=True)
class Settings:
    results: tyro.conf.Positional[tuple[Path, ...]]
    """JSON files of flce_dist.launch.bench."""
    out: Path = Path("runs/figures")
    """Folder for the pictures."""


def main(args: list[str] | None = None) -> int:
    """Return 0 if every file could be read, else 2."""
    settings = tyro.cli(Settings, args=args, description=__doc__)
    try:
        if not settings.results:
            raise ConfigError("results must name at least one file, got none")
        for path in draw(list(settings.results), settings.out):
            print(path)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def draw(results: list[Path], out: Path) -> list[Path]:
    """Write the pictures of each result file; return their paths."""
    stems = [path.stem for path in results]
    if len(set(stems)) < len(stems):
        raise ConfigError(f"results must have names of their own, got {stems}")
    written = []
    for path in results:
        about, records = read_results(path)
        for name, figure_of in FIGURES.items():
            figure = figure_of(records)
            if figure is None:
                continue
            figure.text(
                0.5, -0.01, caption(about), ha="center", va="top", fontsize=7, color="dimgray"
            )
            out.mkdir(parents=True, exist_ok=True)
            written.append(out / f"{path.stem}-{name}.png")
            figure.savefig(written[-1], dpi=130, bbox_inches="tight")
    return written


def caption(about: dict[str, Any]) -> str:
    """Say what the numbers hold for, in two lines."""
    packages = {
        name: about.get(name) for name in ("flce_dist", "commit", "torch", "triton", "cuda")
    }
    packages |= about.get("peers", {})
    ranks = about.get("ranks", 1)
    hardware = f"{ranks} x {about.get('hardware')}" if ranks > 1 else str(about.get("hardware"))
    known = [f"{name} {version}" for name, version in packages.items() if version is not None]
    return f"{hardware}\n{', '.join(known)}"


if __name__ == "__main__":
    sys.exit(main())
