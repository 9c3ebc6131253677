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

from flce_dist.launch.program import run_program  # isort: skip  # before other packages

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from flce_dist.launch.bench.checkpointed_run import (
    check,
    console,
    facts_of,
    read_settings,
    unseen,
    with_run,
)
from flce_dist.launch.bench.files import with_suffix
from flce_dist.launch.bench.head_errors import HEADS, MeanRecord, measure
from flce_dist.launch.train.config import RunConfig
from flce_dist.launch.train.ranks import say
from flce_dist.launch.train.trainer import Trainer
from flce_dist.launch.write import check_writable, write_json
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
    settings = read_settings(Settings, args, PROGRAM, __doc__)
    check(settings, "to measure mean gradients")
    check_writable(with_suffix(settings.out, ".json"))
    with_run(settings, bench)
    return 0


def bench(settings: Settings, trainer: Trainer) -> None:
    """Measure at the newest checkpoint, write the result file after each batch, print a table."""
    size, N = settings.data.batch_size, settings.batches
    facts = {
        **facts_of(trainer, PROGRAM),
        "batches": N,
        "unseen_batches": unseen(trainer, size, N),
        "tokens_per_batch": size * settings.model.seq_length,
    }
    if facts["unseen_batches"] < N:
        trained_on = N - facts["unseen_batches"]
        say(f"{trained_on} of the {N} batches are text that the run was trained on")
    path = with_suffix(settings.out, ".json")
    for n, records in measure(trainer, N, HEADS):
        so_far = {"batches": n, "unseen_batches": unseen(trainer, size, n)}
        rows = [dataclasses.asdict(record) for record in records]
        write_json(path, {"about": facts | so_far, "records": rows})
    console().print(table(records, facts))
    say(f"records in {path}")


def table(records: list[MeanRecord], facts: dict[str, Any]) -> Table:
    """Return the errors, one section for each group of parameters."""
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
