"""Turn the folders of several runs into one result file, which ``launch.plot`` draws.

    python -m flce_dist.launch.train.results docs/results/convergence.json \
        "ours=runs/ours" "Megatron=runs/megatron"

A run leaves ``run.json`` (hardware, versions, commit, command and configuration) and
``metrics.jsonl``. The result file has what all runs share of the first, and for each run by its
label what is its own, both losses over steps, the validation loss by the frequency of labels, the
median step and the peak memory. Of more than 1000 steps a curve has means of 5 steps each, or of
25, and so on: ``steps_per_point``.
"""

from flce_dist.launch.program import RunError, run_program  # isort: skip  # before other packages

import json
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

from flce_dist.launch.about import about
from flce_dist.launch.dropped_tiles import SHARES
from flce_dist.launch.strict_json import strict_json
from flce_dist.launch.train.config import RunConfig, flatten
from flce_dist.launch.write import write_json, write_text

ORIGIN = "run.json"
METRICS = "metrics.jsonl"
MOST_POINTS = 1000
"""Of a curve over steps."""
WARM_UP = 20
"""Steps whose times are left out: kernels are compiled in the first."""


@dataclass(frozen=True)
class Settings:
    out: tyro.conf.Positional[Path]
    """The result file."""
    runs: tyro.conf.Positional[tuple[str, ...]]
    """LABEL=FOLDER of each run."""


def write_origin(config: RunConfig, device: torch.device) -> None:
    """Write what this run's numbers depend on into its folder; for one rank."""
    origin = {
        **about(device),
        "ranks": dist.get_world_size(),
        "command": ["python", "-m", "flce_dist.launch.train", *sys.argv[1:]],
        "config": flatten(config),
    }
    write_json(config.out_dir / ORIGIN, origin)


def collect(runs: dict[str, Path]) -> dict[str, Any]:
    """Return the contents of the result file.

    Raises:
        RunError: if a folder has no records, or hardware, versions or commits differ.
    """
    origins, found = {}, {}
    for label, folder in runs.items():
        try:
            origins[label] = json.loads((folder / ORIGIN).read_text())
            lines = (folder / METRICS).read_text().splitlines()
            curves = _curves([json.loads(line) for line in lines])
        except (OSError, ValueError) as error:
            raise RunError(f"{folder} must be the folder of a run: {error}") from error
        except KeyError as error:
            raise RunError(
                f"{folder} must be of a run of this version; a record in {METRICS} lacks {error}"
            ) from error
        command, config = origins[label].pop("command"), origins[label].pop("config")
        found[label] = {"command": " ".join(command), "config": config, **curves}
    first, *others = origins
    for label in others:
        wrong = [key for key in origins[first] if origins[label].get(key) != origins[first][key]]
        if wrong:
            raise RunError(f"runs must share {', '.join(wrong)}; {label} and {first} do not")
    return {"about": origins[first], "runs": found}


def _curves(records: list[dict[str, Any]]) -> dict[str, Any]:
    train = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    if len(train) <= WARM_UP:
        raise RunError(f"a run must have more than {WARM_UP} steps, got {len(train)}")
    steady = train[WARM_UP:]
    every = 1
    while len(train) > MOST_POINTS * every:
        every *= 5
    curves = {"loss": 4, "gradient_norm": 4}
    curves |= {name: 5 for name in SHARES if name in train[0]}
    return {
        "tokens_per_s": round(statistics.median(r["tokens_per_s"] for r in steady)),
        "step_ms": round(statistics.median(r["step_ms"] for r in steady), 2),
        "peak_mib": max((round(r["peak_mib"]) for r in train if "peak_mib" in r), default=None),
        "head_peak_mib": round(train[0]["head_peak_mib"], 1),
        "steps_per_point": every,
        **{
            name: [
                _mean([r[name] for r in train[start : start + every]], digits)
                for start in range(0, len(train), every)
            ]
            for name, digits in curves.items()
        },
        "validation": [[r["step"], _mean([r["loss"]], 5)] for r in validation],
        "by_frequency": _by_frequency([r["by_frequency"] for r in validation]),
    }


def _mean(values: list[float | None], digits: int) -> float | None:
    """Return the mean; None, which stands for a number that was not finite, if any is None."""
    known = [x for x in values if x is not None]
    return round(statistics.fmean(known), digits) if len(known) == len(values) else None


def _by_frequency(validations: list[list[dict[str, Any]]]) -> dict[str, list[Any]]:
    """Return where bands begin, how many labels each holds, and their losses in each validation."""
    last = validations[-1] if validations else []
    return {
        "from": [band["from"] for band in last],
        "tokens": [band["tokens"] for band in last],
        "loss": [[_mean([band["loss"]], 5) for band in bands] for bands in validations],
    }


def main(args: list[str] | None = None) -> int:
    settings = tyro.cli(
        Settings, prog="python -m flce_dist.launch.train.results", args=args, description=__doc__
    )
    runs = {}
    for run in settings.runs:
        label, equals, folder = run.rpartition("=")
        if not equals or label in runs:
            raise RunError(f"runs must be LABEL=FOLDER with labels of their own, got {run}")
        runs[label] = Path(folder)
    if not runs:
        raise RunError("runs must name at least one LABEL=FOLDER, got none")
    result = collect(runs)
    text = strict_json(result)  # with a list of numbers in one line
    text = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    write_text(settings.out, text + "\n")
    print(settings.out)
    return 0


if __name__ == "__main__":
    run_program(main)
