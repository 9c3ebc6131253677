"""Time a training step with our head and with Megatron's: the same run with each, one by one.

    python -m flce_dist.launch.train.heads --config configs/convergence.yaml \
        --data.text corpus.txt --steps 100 --out runs/heads

All arguments but ``--out`` are those of flce_dist.launch.train. Runs are kept in ``out``/, where a
run that had ended is not repeated, and one that had not goes on; those of another commit are
refused. Result: out.json, {"about": {...}, "records": [...]}; of the steps after the first 20 the
median counts.
"""

from flce_dist.launch.program import RunError, run_program  # isort: skip  # before other packages

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from flce_dist.launch.about import VERSIONS, about, differences
from flce_dist.launch.call_time import percentiles
from flce_dist.launch.read import parse_json, read_bytes
from flce_dist.launch.train.config import load_config
from flce_dist.launch.train.log import METRICS, RUN, record_in
from flce_dist.launch.write import check_writable, with_suffix, write_json

PROGRAM = "flce_dist.launch.train.heads"
SET_HERE = "--head.kind", "--head.schedule", "--out-dir"
WARM_UP = 20
"""Steps that compile, tune and fill caches."""

OURS_ALONE = "--head.schedule auto --head.max-logits-bytes None --head.impl None".split()
"""Options of our head that decide how it computes, and not what: Megatron's has none of them."""

HEADS = {
    "cached": ["--head.schedule", "cached"],
    "in_forward": ["--head.schedule", "in_forward"],
    "megatron_fused": ["--head.kind", "megatron_fused", *OURS_ALONE],
    "megatron_unfused": ["--head.kind", "megatron_unfused", *OURS_ALONE],
}
"""The arguments of each, by the folder of its run."""


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description="Train for a few steps with each head; further arguments are those of "
        "flce_dist.launch.train.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, help="stem of the result file, out.json")
    own, of_train = parser.parse_known_args(arguments)
    path = with_suffix(own.out, ".json", "--out")
    for argument in of_train:
        option = argument.partition("=")[0].replace("_", "-")
        if option in SET_HERE:
            raise RunError(f"{option} is set for each head, so it must be left out")
    check_writable(path)
    runs = {
        name: [*of_train, *how, "--out-dir", f"{own.out / name}"] for name, how in HEADS.items()
    }
    for of_run in runs.values():
        if load_config(of_run).steps <= WARM_UP:
            raise RunError(f"--steps must be more than the {WARM_UP} that warm up")
    _check_versions([own.out / name for name in runs])
    for name, of_run in runs.items():
        print(f"{name}:", flush=True)
        command = [sys.executable, "-m", "flce_dist.launch.train", *of_run]
        status = subprocess.run(command).returncode
        if status:
            return status
    of_runs = {name: _facts(own.out / name) for name in runs}
    facts = {key: x for key, x in of_runs["cached"].items() if key not in ("command", "config")}
    facts["command"] = shlex.join(["python", "-m", PROGRAM, *arguments])
    records = [_record(name, of_runs[name], own.out / name) for name in runs]
    write_json(path, {"about": facts, "records": records})
    for record in records:
        print(
            "{head:17}{p50_ms:9.1f} ms, {tokens_per_s:9,.0f} tokens/s, its head "
            "{head_mib:7,.0f} MiB".format_map(record)
        )
    print(f"records in {path}")
    return 0


def _check_versions(runs: list[Path]) -> None:
    """Raise ``RunError`` if a run is there that another commit or version has begun.

    It would go on, or not be repeated, and its steps would count as those of this one.
    """
    begun = [run for run in runs if (run / RUN).exists()]
    if not begun:
        return
    now = about(torch.device("cpu"))
    for run in begun:
        unlike = differences(_facts(run), now, VERSIONS)
        if unlike:
            raise RunError(
                f"{run} holds steps of other code: {'; '.join(unlike)}. Give another --out, or "
                "move it elsewhere"
            )


def _facts(run: Path) -> dict[str, Any]:
    return parse_json(read_bytes(run / RUN))


def _record(head: str, facts: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return what the steps of a run took, and the last validation loss."""
    config = facts["config"]
    lines = read_bytes(run / METRICS).splitlines(keepends=True)
    events = [record for record in map(record_in, lines) if record is not None]
    steps = [x for x in events if x["kind"] == "train"]
    losses = [x["loss"] for x in events if x["kind"] == "validation"]
    times = [x["step_ms"] for x in steps[WARM_UP:]]
    p20, p50, p80 = percentiles(times)
    replicas = facts["ranks"] // config["parallel.tensor"]
    sequences = config["data.batch_size"] * config["data.microbatches"] * replicas
    tokens = sequences * config["model.seq_length"]
    return {
        "head": head,
        "mode": "training",
        "T": tokens,
        "H": config["model.hidden_size"],
        "layers": config["model.num_layers"],
        "steps": len(steps),
        "p20_ms": p20,
        "p50_ms": p50,
        "p80_ms": p80,
        "tokens_per_s": 1e3 * tokens / p50,
        "peak_mib": max(x["peak_mib"] for x in steps) if "peak_mib" in steps[0] else None,  # GPUs
        "head_mib": steps[-1]["head_peak_mib"],
        "loss": steps[-1]["loss"],
        "validation_loss": losses[-1],
    }


if __name__ == "__main__":
    run_program(main)
