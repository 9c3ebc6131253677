"""How losses differ after training on from one checkpoint with filtered and other gradients.

    python -m flce_dist.launch.bench.branches --config configs/filtered.yaml \
        --data.text corpus.txt --out-dir runs/filtered/exact --head.schedule cached

takes the options of a training run and opens its newest checkpoint. From these weights and this
optimizer state it trains on with one head after the other over the same stretch of text, and then
over the next stretch. Losses of whole runs differ by chance more than by the head; here they are
compared within a stretch, and several stretches give a standard error. "exact, again" repeats
"exact": on GPUs gradients of attention are not the same from run to run.

The result file is replaced after each branch, so an interrupted benchmark keeps what it has.
"""

from flce_dist.launch.program import run_program  # isort: skip  # before other packages

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from flce_dist.launch.bench.branch_records import EXACT, Branch, Difference, differences
from flce_dist.launch.bench.branch_runs import HEADS, run_branches
from flce_dist.launch.bench.checkpointed_run import (
    check,
    console,
    facts_of,
    read_settings,
    unseen,
    with_run,
)
from flce_dist.launch.bench.files import with_suffix
from flce_dist.launch.train.config import RunConfig
from flce_dist.launch.train.optimizer import learning_rate
from flce_dist.launch.train.ranks import say
from flce_dist.launch.train.trainer import Trainer
from flce_dist.launch.write import check_writable, write_json
from flce_dist.launch.yaml_config import SIZE, ConfigError

PROGRAM = "flce_dist.launch.bench.branches"


@dataclass(frozen=True)
class Settings(RunConfig):
    """Those of the training run, and some of this benchmark."""

    branch_steps: Annotated[int, SIZE] = 400
    """Steps of one branch."""
    branch_validate_every: Annotated[int, SIZE] = 100
    """Steps between validations of a branch, which also ends with one."""
    stretches: Annotated[int, SIZE] = 5
    """Stretches of text, each of branch_steps steps."""
    heads: tuple[str, ...] = tuple(HEADS)
    """Which of them to train with; the first must be exact."""
    out: Path = Path("runs/bench/branches")
    """Stem of the result file, out.json."""


def main(args: list[str] | None = None) -> int:
    settings = read_settings(Settings, args, PROGRAM, __doc__)
    heads = settings.heads
    if heads[:1] != (EXACT,) or len(set(heads)) < len(heads) or not set(heads) <= set(HEADS):
        known = ", ".join(f'"{name}"' for name in HEADS)
        raise ConfigError(f'heads must be "{EXACT}", then others of {known}, got {list(heads)}')
    check(settings, "to branch a run")
    check_writable(with_suffix(settings.out, ".json"))
    with_run(settings, bench)
    return 0


def bench(settings: Settings, trainer: Trainer) -> None:
    """Train all branches from the newest checkpoint; print a table and write the result file."""
    steps, stretches = settings.branch_steps, settings.stretches
    facts = {
        **facts_of(trainer, PROGRAM),
        "branch_steps": steps,
        "stretches": stretches,
        "unseen_stretches": unseen(trainer, steps * trainer.samples_per_step, stretches),
        "tokens_per_step": trainer.samples_per_step * settings.model.seq_length,
        "learning_rate": [learning_rate(trainer.step + i, settings.optimizer) for i in (1, steps)],
    }
    if facts["unseen_stretches"] < stretches:
        trained_on = stretches - facts["unseen_stretches"]
        say(f"{trained_on} of the {stretches} stretches have text that the run was trained on")
    path = with_suffix(settings.out, ".json")
    found: list[Branch] = []
    for branch in run_branches(
        trainer,
        {name: HEADS[name] for name in settings.heads},
        steps=steps,
        validate_every=settings.branch_validate_every,
        stretches=stretches,
    ):
        found.append(branch)
        write_json(path, content(facts, found))
        losses = " ".join("-" if x is None else f"{x:.4f}" for x in branch.validation)
        say(
            f"stretch {branch.stretch + 1} of {stretches}, {branch.head}: "
            f"validation {losses}, {branch.seconds:.1f} s"
        )
    console().print(table(differences(found), facts))
    say(f"records in {path}")


def content(facts: dict[str, Any], branches: list[Branch]) -> dict[str, Any]:
    """Return the content of the result file, in which losses that are not finite are null."""
    return {
        "about": facts,
        "branches": [dataclasses.asdict(branch) for branch in branches],
        "differences": [dataclasses.asdict(each) for each in differences(branches)],
    }


def table(found: list[Difference], facts: dict[str, Any]) -> Table:
    """Return the differences, one section for each head, by step or by band of labels."""
    title = "validation loss minus that of exact, from step {step}".format_map(facts)
    made = Table(title=title, caption="mean over stretches of text")
    made.add_column("head", no_wrap=True)
    for heading in ("steps", "labels from", "difference", "standard error", "stretches"):
        made.add_column(heading, justify="right", no_wrap=True)
    last = None
    for each in found:
        key = each.head, each.labels_from is None
        is_new, last = key != last, key
        if is_new:
            made.add_section()
        error = "-" if each.standard_error is None else f"{each.standard_error:.5f}"
        name, mean = each.head if is_new else "", f"{each.mean:+.5f}"
        labels = "all" if each.labels_from is None else f"{each.labels_from:,}"
        made.add_row(name, str(each.step), labels, mean, error, str(each.n))
    return made


if __name__ == "__main__":
    run_program(main)
