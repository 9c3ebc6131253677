"""Training on from one checkpoint, again and again, with one head and then the next."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

from torch import Tensor

from flce_dist.launch.bench.branch_records import EXACT, Branch
from flce_dist.launch.bench.heads import APPROXIMATE, CACHED, RECOMPUTED, Head, switched
from flce_dist.launch.train.state import model_state, optimizer_state, restore
from flce_dist.launch.train.trainer import Trainer

HEADS: dict[str, Head] = {
    EXACT: CACHED,
    "filtered, 2^-12": APPROXIMATE["filtered, 2^-12"],
    "filtered, 2^-10": APPROXIMATE["filtered, 2^-10"],
    "exact, again": CACHED,  # what chance alone does
    "exact, recomputed": RECOMPUTED,  # as with filter_eps=0.0
    "dropped, 2^-12": APPROXIMATE["dropped, 2^-12"],
}


def run_branches(
    trainer: Trainer,
    heads: dict[str, Head],
    *,
    steps: int,
    validate_every: int,
    stretches: int,
) -> Iterator[Branch]:
    """Yield a branch for each stretch and head, all from where the trainer is.

    Stretch k begins k * ``steps`` steps further in the training text; the learning rate goes on as
    in the run. Between branches the trainer is as before. Holds a copy of the weights and of the
    optimizer's state on the device.
    """
    start = _copy(_state(trainer))
    for stretch in range(stretches):
        samples = trainer.samples + stretch * steps * trainer.samples_per_step
        for name, head in heads.items():
            with _branching(trainer, start, samples):
                branch = _run(trainer, head, steps, validate_every, stretch, name)
            yield branch


def _state(trainer: Trainer) -> dict[str, Tensor]:
    """Return all that a step changes, no copies; nothing in it draws random numbers."""
    return model_state(trainer.optimizer) | optimizer_state(trainer.optimizer)


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@contextmanager
def _branching(trainer: Trainer, start: dict[str, Tensor], samples: int) -> Iterator[None]:
    """Continue the data after ``samples``; then return to ``start`` and the trainer's position."""
    before = trainer.step, trainer.samples, trainer.filtered
    trainer.samples = samples
    try:
        yield
    finally:
        restore(_state(trainer), start)
        trainer.step, trainer.samples, trainer.filtered = before


def _run(
    trainer: Trainer, head: Head, steps: int, validate_every: int, stretch: int, name: str
) -> Branch:
    """Train with ``head``; validate with the run's own, which is the same in all branches."""
    began, step, by_frequency = time.perf_counter(), 0, []
    ends, validation, training = [], [], []
    shares: dict[str, list[float]] = {}
    while step < steps:
        end, losses = min(step + validate_every, steps), []
        with switched(trainer.model.output_layer, head):
            for _ in range(step, end):
                losses.append(trainer.train_step()[0])
                for share, value in trainer.filtered.items():
                    shares.setdefault(share, []).append(value)
        step = end
        found = trainer.validate()
        ends.append(step)
        validation.append(found.loss)
        training.append(fmean(losses))
        by_frequency = found.by_frequency
    return Branch(
        stretch=stretch,
        head=name,
        steps=ends,
        validation=validation,
        training=training,
        by_frequency=by_frequency,
        shares={share: fmean(values) for share, values in shares.items()},
        seconds=round(time.perf_counter() - began, 2),
    )
