"""A training run's newest checkpoint, opened by a benchmark in one process.

The benchmark has the options of the training run and some of its own. It holds the lock of the
run's folder and saves no checkpoint.
"""

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from flce_dist.launch.about import about
from flce_dist.launch.program import RunError
from flce_dist.launch.train.config import HeadConfig, RunConfig, check_config, flatten
from flce_dist.launch.train.data import Corpus, load_corpus
from flce_dist.launch.train.device import choose_device, join_ranks
from flce_dist.launch.train.lock import held
from flce_dist.launch.train.ranks import said
from flce_dist.launch.train.trainer import Trainer
from flce_dist.launch.yaml_config import ConfigError, from_command_line

Settings = TypeVar("Settings", bound=RunConfig)


def read_settings(
    schema: type[Settings], args: list[str] | None, program: str, description: str | None
) -> Settings:
    """Return the options of the command line, not checked."""
    return from_command_line(
        schema,
        sys.argv[1:] if args is None else args,
        prog=f"python -m {program} --config FILE",
        description=description or "",
        show_errors=True,
    )


def check(settings: RunConfig, purpose: str) -> None:
    """Raise ``ConfigError`` for what is not measured here, ``RunError`` without a checkpoint.

    ``purpose``, such as "to measure mean gradients", ends the messages.
    """
    sizes = {
        "parallel.tensor": settings.parallel.tensor,
        "parallel.context": settings.parallel.context,
        "the number of ranks that torchrun starts": int(os.environ.get("WORLD_SIZE", "1")),
    }
    for name, size in sizes.items():
        if size != 1:
            raise ConfigError(f"{name} must be 1 {purpose}, got {size}")
    check_config(settings, world_size=1)
    free = {"kind", "schedule", "max_logits_bytes", "impl", "filter_eps", "vocab_order"}
    for name, value in vars(settings.head).items():
        expected = getattr(HeadConfig, name)
        if name not in free and value != expected:
            raise ConfigError(f"head.{name} must be {expected} {purpose}, got {value}")
    if settings.head.kind.startswith("megatron_"):
        raise ConfigError(
            f"head.kind must be linear_cross_entropy or dropped_tiles {purpose}, "
            f"got {settings.head.kind}"
        )
    if not any((settings.out_dir / "checkpoints").glob("step-*")):
        raise _no_checkpoint(settings)


def with_run(settings: Settings, bench: Callable[[Settings, Trainer], None]) -> None:
    """Call ``bench`` with the trainer ``at_checkpoint``, in a process group of one rank."""
    device = choose_device(settings)
    if not dist.is_initialized():
        join_ranks(device, store=dist.HashStore(), rank=0, world_size=1)
    with held(settings.out_dir):
        with said("loading vocabulary and text"):
            corpus = load_corpus(settings)
        bench(settings, at_checkpoint(settings, corpus, device))


def at_checkpoint(settings: RunConfig, corpus: Corpus, device: torch.device) -> Trainer:
    """Return the run's trainer where its newest checkpoint left it."""
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(RunConfig)}
    # To start anew would set all checkpoints aside.
    config = RunConfig(**fields | {"anew_if_damaged": False})
    with said("building the model"):
        trainer = Trainer(config, corpus, device)
        if trainer.resume() is None:
            raise _no_checkpoint(settings)
    return trainer


def _no_checkpoint(settings: RunConfig) -> RunError:
    return RunError(
        f"out_dir must be the folder of a training run with a checkpoint, got {settings.out_dir}"
    )


def facts_of(trainer: Trainer, program: str) -> dict[str, Any]:
    """Return what numbers of this benchmark hold for."""
    return {
        "command": shlex.join(["python", "-m", program, *sys.argv[1:]]),
        "ranks": 1,
        **about(trainer.device),
        "config": flatten(trainer.config),
        "step": trainer.step,
    }


def unseen(trainer: Trainer, samples: int, most: int) -> int:
    """Return how many of the next ``most`` parts of so many samples the run was not trained on."""
    left = len(trainer.corpus.train) - trainer.samples
    return min(max(left // samples, 0), most)


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140)
