"""Errors of gradients in one batch and in the mean over many, by head and group of parameters.

Schedule recompute, EXACT, is what other heads are compared with.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flce_dist.launch.bench.heads import APPROXIMATE, CACHED, RECOMPUTED, Head, switched
from flce_dist.launch.train.model import token_losses
from flce_dist.launch.train.ranks import say
from flce_dist.launch.train.trainer import Trainer
from flce_dist.launch.train.validation import BANDS

EXACT = RECOMPUTED
HEADS: dict[str, Head] = {"cached": CACHED, **APPROXIMATE}  # the first: what rounding alone does


@dataclass(frozen=True)
class Group:
    """The layers below the head, or rows of the head's weight, by rank of their tokens' frequency.

    Attributes:
        first, last: of the rows; None for the layers.
        gradient: returns a copy of ``main_grad``, flat and in fp32.
    """

    first: int | None
    last: int | None
    gradient: Callable[[], Tensor]

    @property
    def name(self) -> str:
        return "layers" if self.first is None else f"rows {self.first:,} to {self.last:,}"


def groups_of(trainer: Trainer) -> list[Group]:
    model: Any = trainer.model
    layer, layers = model.output_layer, list(model.decoder.parameters())
    tied = model.share_embeddings_and_output_weights
    weight = model.embedding.word_embeddings.weight if tied else layer.weight
    by_rank = trainer.counts.argsort(descending=True, stable=True).to(trainer.device)
    rows = by_rank if layer.row_of_token is None else layer.row_of_token[by_rank]

    def of_rows(chosen: Tensor) -> Tensor:
        return weight.main_grad[chosen].flatten()

    found = [Group(None, None, lambda: torch.cat([p.main_grad.flatten() for p in layers]))]
    for first, end in zip(BANDS, (*BANDS[1:], len(rows)), strict=True):
        chosen = rows[first:end]
        if len(chosen):
            last = first + len(chosen) - 1
            found.append(Group(first, last, functools.partial(of_rows, chosen)))
    return found


class Moments:
    """Of one vector per batch: the sum, in its own dtype, and the sum of squared norms, in fp64."""

    def __init__(self) -> None:
        self.batches, self.sum, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, x: Tensor) -> None:
        self.sum = self.sum.add_(x) if self.batches else x.clone()
        self.squares = self.squares.to(x.device) + _square(x)
        self.batches += 1

    @property
    def rms(self) -> float:
        return math.sqrt(float(self.squares) / self.batches)

    @property
    def noise_square(self) -> float:
        """Estimate of E|mean - E mean|^2 for independent batches: their variance over N."""
        n = self.batches
        return float(self.squares / n - _square(self.sum / n)) / (n - 1)

    @property
    def mean_square(self) -> float:
        """Unbiased estimate of |E mean|^2 for independent batches; may be negative."""
        return float(_square(self.sum / self.batches)) - self.noise_square


def _square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


@dataclass(frozen=True)
class MeanRecord:
    """One head's errors in one group of parameters, relative to the exact gradient.

    None where that is 0, or its mean is not told from 0.
    """

    head: str
    group: str
    first: int | None  # rank by frequency
    last: int | None
    elements: int
    exact_rms: float  # over batches, of the norm of the exact gradient
    exact_mean: float  # norm of its mean, without sampling noise
    batch_error: float | None
    mean_error: float | None  # 0 where mean_error_square is negative
    mean_error_square: float | None
    noise: float | None

    @classmethod
    def of(cls, head: str, group: Group, exact: Moments, error: Moments) -> "MeanRecord":
        exact_square = max(exact.mean_square, 0.0)
        square = _over(error.mean_square, exact_square)
        return cls(
            head,
            group.name,
            group.first,
            group.last,
            elements=exact.sum.numel(),
            exact_rms=_rounded(exact.rms),
            exact_mean=_rounded(math.sqrt(exact_square)),
            batch_error=_over(error.rms, exact.rms),
            mean_error=None if square is None else _rounded(math.sqrt(max(square, 0.0))),
            mean_error_square=square,
            noise=_over(math.sqrt(max(error.noise_square, 0.0)), math.sqrt(exact_square)),
        )


def _over(x: float, y: float) -> float | None:
    return _rounded(x / y) if y > 0 else None


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")


def measure(
    trainer: Trainer, batches: int, heads: dict[str, Head]
) -> Iterator[tuple[int, list[MeanRecord]]]:
    """Yield how many batches were read, from two on, and records of each group and head over them.

    All at the trainer's weights and position. Holds sums of gradients, for EXACT and each head, and
    the exact gradient of one batch.
    """
    groups, size = groups_of(trainer), trainer.config.data.batch_size
    exact = [Moments() for _ in groups]
    errors = {name: [Moments() for _ in groups] for name in heads}

    def records() -> list[MeanRecord]:
        return [
            MeanRecord.of(name, group, exact[i], errors[name][i])
            for i, group in enumerate(groups)
            for name in heads
        ]

    for i in range(batches):
        start = time.perf_counter()
        batch = trainer.corpus.train_batch(trainer.samples + i * size, size)
        _differentiate(trainer, batch, EXACT)
        truth = [group.gradient() for group in groups]
        for moments, x in zip(exact, truth, strict=True):
            moments.add(x)
        for name, head in heads.items():
            _differentiate(trainer, batch, head)
            for moments, group, x in zip(errors[name], groups, truth, strict=True):
                moments.add(group.gradient().sub_(x))
        del truth
        say(f"batch {i + 1} of {batches}, {time.perf_counter() - start:.1f} s")
        if i:
            yield i + 1, records()


def _differentiate(trainer: Trainer, batch: tuple[Tensor, Tensor], head: Head) -> None:
    """Make ``main_grad`` the gradient of the mean loss of a batch, by ``head``."""
    trainer.distributed.zero_grad_buffer()
    tokens, labels = (x.to(trainer.device) for x in batch)
    with switched(trainer.model.output_layer, head):
        token_losses(trainer.distributed, tokens, labels).mean().backward()
