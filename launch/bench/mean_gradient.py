"""How gradients of filtered and other heads differ from exact ones, in a batch and in the mean.

    python -m flce_dist.launch.bench.mean_gradient --config configs/filtered.yaml \
        --data.text corpus.txt --out-dir runs/filtered/exact --head.schedule cached

takes the options of a training run and opens its newest checkpoint. At these weights each head
computes the gradients of the batches that the run would read next. In training, errors that are
independent from batch to batch average out; a bias stays.

Errors are relative to gradients of schedule recompute, as norms over a group of parameters: the
layers below the head, and rows of the output layer's weight by how frequent their tokens are in the
training text. Of a tied weight they include what comes from the input. "per batch" is the rms of
|g - exact| over batches, divided by that of |exact|. "mean" is |E(g - exact)| / |E exact|, with
sampling noise subtracted from both squares. "noise" is what independent, unbiased errors of the
same spread leave in a mean over as many batches.
"""

import dataclasses
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from flce_dist.launch.about import about
from flce_dist.launch.bench.files import with_suffix
from flce_dist.launch.bench.head_errors import HEADS, MeanRecord, measure
from flce_dist.launch.program import RunError, run_program
from flce_dist.launch.replacing import replacing
from flce_dist.launch.strict_json import strict_json
from flce_dist.launch.train.config import HeadConfig, RunConfig, check_config, flatten
from flce_dist.launch.train.data import Corpus, load_corpus
from flce_dist.launch.train.device import choose_device, join_ranks
from flce_dist.launch.train.lock import held
from flce_dist.launch.train.ranks import said, writing
from flce_dist.launch.train.trainer import Trainer
from flce_dist.launch.yaml_config import ConfigError, from_command_line
from flce_dist.options import Range

PROGRAM = "flce_dist.launch.bench.mean_gradient"


@dataclass(frozen=True)
class Settings(RunConfig):
    """Those of the training run, and two of this benchmark."""

    batches: Annotated[int, Range("within [2, 2**31)", lambda x: 2 <= x < 2**31)] = 32
    """Batches that the means are over."""
    out: Path = Path("runs/bench/mean_gradient")
    """Stem of the result file, out.json."""


def main(args: list[str] | None = None) -> int:
    settings = from_command_line(
        Settings,
        sys.argv[1:] if args is None else args,
        prog=f"python -m {PROGRAM} --config FILE",
        description=__doc__,
        show_errors=True,
    )
    check(settings)
    device = choose_device(settings)
    if not dist.is_initialized():
        join_ranks(device, store=dist.HashStore(), rank=0, world_size=1)
    with held(settings.out_dir):
        with said("loading vocabulary and text"):
            corpus = load_corpus(settings)
        bench(settings, corpus, device)
    return 0


def check(settings: Settings) -> None:
    """Raise ``ConfigError`` for what is not measured here, ``RunError`` without a checkpoint."""
    sizes = {
        "parallel.tensor": settings.parallel.tensor,
        "parallel.context": settings.parallel.context,
        "the number of ranks that torchrun starts": int(os.environ.get("WORLD_SIZE", "1")),
    }
    for name, size in sizes.items():
        if size != 1:
            raise ConfigError(f"{name} must be 1 to measure mean gradients, got {size}")
    check_config(settings, world_size=1)
    free = {"kind", "schedule", "max_logits_bytes", "impl", "filter_eps", "vocab_order"}
    for name, value in vars(settings.head).items():
        expected = getattr(HeadConfig, name)
        if name not in free and value != expected:
            raise ConfigError(f"head.{name} must be {expected} as in dropped tiles, got {value}")
    if settings.head.kind.startswith("megatron_"):
        raise ConfigError(
            "head.kind must be linear_cross_entropy or dropped_tiles to measure mean gradients, "
            f"got {settings.head.kind}"
        )
    if not any((settings.out_dir / "checkpoints").glob("step-*")):
        raise _no_checkpoint(settings)


def _no_checkpoint(settings: Settings) -> RunError:
    return RunError(
        f"out_dir must be the folder of a training run with a checkpoint, got {settings.out_dir}"
    )


def bench(settings: Settings, corpus: Corpus, device: torch.device) -> None:
    """Measure at the newest checkpoint, print a table and write the result file."""
    fields = [field.name for field in dataclasses.fields(RunConfig)]
    config = RunConfig(**{name: getattr(settings, name) for name in fields})
    with said("building the model"):
        trainer = Trainer(config, corpus, device)
        if trainer.resume() is None:
            raise _no_checkpoint(settings)
    size, N = config.data.batch_size, settings.batches
    unseen = min(max((len(corpus.train) - trainer.samples) // size, 0), N)
    facts = {
        "command": shlex.join(["python", "-m", PROGRAM, *sys.argv[1:]]),
        "ranks": 1,
        **about(device),
        "config": flatten(config),
        "step": trainer.step,
        "batches": N,
        "unseen_batches": unseen,
        "tokens_per_batch": size * config.model.seq_length,
    }
    console = Console(width=None if sys.stdout.isatty() else 140)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    if unseen < N:
        say(f"{N - unseen} of the {N} batches are text that the run was trained on")
    records = measure(trainer, N, HEADS, say)
    console.print(table(records, facts))
    path = with_suffix(settings.out, ".json")
    with writing(path), replacing(path) as scratch:
        found = {"about": facts, "records": [dataclasses.asdict(record) for record in records]}
        scratch.write_text(strict_json(found) + "\n")
    say(f"records in {path}")


def table(records: list[MeanRecord], facts: dict[str, Any]) -> Table:
    title = "step {step}: {batches} batches of {tokens_per_batch} tokens".format_map(facts)
    made = Table(title=title, caption="*: the estimate of its square is below 0")
    for heading in ("parameters", "head"):
        made.add_column(heading, no_wrap=True)
    for heading in ("per batch", "mean", "noise"):
        made.add_column(heading, justify="right", no_wrap=True)
    last = None
    for record in records:
        is_new, last = record.group != last, record.group
        if is_new:
            made.add_section()
        values = (record.batch_error, record.mean_error, record.noise)
        batch, mean, noise = ("-" if x is None else f"{x:.5f}" for x in values)
        mean += "*" if (record.mean_error_square or 0.0) < 0 else " "
        made.add_row(record.group if is_new else "", record.head, batch, mean, noise)
    return made


if __name__ == "__main__":
    run_program(main)
