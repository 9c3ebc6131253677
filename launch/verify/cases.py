"""What ``verify`` runs: the variants of the loss, their data, and the ways to compute them.

T = tokens, H = hidden size, V_all = true vocabulary, P = ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce_dist import plan, vocab_range
from flce_dist.options import Reduction, Schedule

METRICS = ("lse", "logprob", "entropy")


class Shape(NamedTuple):
    """Size of one problem, over all ranks."""

    T: int
    H: int
    V_all: int


@dataclass(frozen=True)
class Variant:
    """A loss and its inputs; the cases of one variant share a truth."""

    name: str
    reduction: Reduction = "mean"
    options: tuple[tuple[str, Any], ...] = ()
    bias: bool = False
    token_weight: bool = False
    metrics: bool = False
    padding: int = 0  # rows of the weight beyond the vocabulary
    uneven: bool = False  # shards of different lengths, given by vocab_range


@dataclass(frozen=True)
class Case:
    """One way to compute a variant."""

    variant: Variant
    schedule: Schedule
    sequence_parallel: bool
    max_logits_bytes: int | None = None  # if given, a budget that a part of the columns fits into

    @property
    def name(self) -> str:
        part = "" if self.max_logits_bytes is None else ", part cached"
        return f"{self.schedule}{part}{', SP' if self.sequence_parallel else ''}"

    @property
    def metric_gradients(self) -> bool:
        """Whether lse, logprob and entropy get upstream gradients too."""
        return self.variant.metrics and self.schedule != "in_forward"


def variants() -> list[Variant]:
    """Every reduction, then each option by itself, then many together."""
    smoothing, z_loss = ("label_smoothing", 0.1), ("z_loss_weight", 1e-3)
    softcap, scale = ("softcap", 15.0), ("logit_scale", 0.7)
    return [
        Variant("plain", "mean"),
        Variant("plain", "sum"),
        Variant("plain", "none"),
        Variant("label_smoothing", options=(smoothing,)),
        Variant("z_loss_weight", options=(z_loss,)),
        Variant("softcap", options=(softcap,)),
        Variant("softcap, label_smoothing", options=(softcap, smoothing)),
        Variant("logit_scale", options=(scale,)),
        Variant("bias", bias=True),
        Variant("token_weight", token_weight=True),
        Variant("metrics", metrics=True),
        Variant("padded vocabulary", padding=5),
        Variant("uneven shards", uneven=True),
        Variant(
            "many together",
            "none",
            options=(smoothing, z_loss, scale),
            bias=True,
            token_weight=True,
            metrics=True,
            padding=5,
            uneven=True,
        ),
    ]


def default_shapes(device_type: str, P: int) -> tuple[Shape, ...]:
    """Return a plain shape, an odd one, and one of so many columns that a budget can divide them.

    The plan never makes the window of recomputed columns narrower to cache a part of few columns.
    """
    wide = Shape(16, 64, 36864 * P)
    if device_type == "cuda":
        return Shape(1024, 1024, 32000), Shape(129, 123, 5003), wide
    return Shape(64, 256, 1000), Shape(33, 123, 507), wide


def part_cached_budget(shape: Shape, P: int, dtype: torch.dtype) -> int | None:
    """Return a ``max_logits_bytes`` with which ``cached`` caches only some columns.

    It is the middle one of those that do, and None if none does.
    """
    T, V = _round_up(shape.T, P), _round_up(shape.V_all, P) // P
    column_bytes = T * dtype.itemsize
    budgets = []
    for columns in range(256, 2 * V, 256):
        chosen = plan(
            T=T,
            V=V,
            itemsize=dtype.itemsize,
            schedule="cached",
            max_logits_bytes=columns * column_bytes,
            converts=dtype == torch.float16,
        )
        if 0 < chosen.cached_v < V:
            budgets.append(chosen.logits_bytes)
    return budgets[len(budgets) // 2] if budgets else None


def cases(
    variant: Variant, schedules: tuple[Schedule, ...], P: int, part_cached: int | None
) -> Iterator[Case]:
    """Yield every supported way to compute ``variant`` on P ranks.

    ``part_cached`` comes from ``part_cached_budget``.
    """
    needs_logits = {"softcap", "label_smoothing"} <= dict(variant.options).keys()
    for schedule in schedules:
        if needs_logits and schedule in ("cached", "in_forward"):
            continue
        if variant.reduction == "none" and schedule == "in_forward":
            continue
        for sequence_parallel in (False, True) if P > 1 else (False,):
            yield Case(variant, schedule, sequence_parallel)
            if schedule == "cached" and variant.name == "plain" and part_cached is not None:
                yield Case(variant, schedule, sequence_parallel, part_cached)


@dataclass(frozen=True)
class Data:
    """Whole inputs and upstream gradients, the same on every rank."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    token_weight: Tensor | None
    dloss: Tensor
    dmetrics: Tensor  # [3, T]
    vocab_size: int


def make_data(
    variant: Variant, shape: Shape, P: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Data:
    """Draw inputs, among them the tokens that break losses.

    Confident tokens, tokens whose loss is beyond exp's range, ignored tokens that hold NaN, and
    the first and last row of each shard as labels. T and the vocabulary are rounded up to
    multiples of P, the vocabulary of uneven shards to one row more.
    """
    T, H = _round_up(shape.T, P), shape.H
    rows = _round_up(shape.V_all, P) + variant.uneven
    vocab_size = rows - variant.padding
    generator = torch.Generator().manual_seed(seed)

    hidden = torch.randn(T, H, generator=generator)
    weight = torch.randn(rows, H, generator=generator) * (1.5 / H**0.5)
    bias = torch.randn(rows, generator=generator)
    labels = torch.randint(vocab_size, (T,), generator=generator)
    bounds = [vocab_range(rows, r, P) for r in range(P)]
    edges = [row for start, end in bounds for row in (start, end - 1) if row < vocab_size][:T]
    labels[: len(edges)] = torch.tensor(edges)
    _aim(hidden, weight, labels, {**dict.fromkeys(range(2, T, 4), 12.0), T // 2: -150.0})
    ignored = torch.rand(T, generator=generator) < 0.1
    labels[ignored] = -100
    hidden[ignored] = torch.nan
    weight[vocab_size:] *= 100.0  # would be seen, if it were

    token_weight = torch.rand(T, generator=generator)
    # Upstream of a mean as large as a loss scale makes it: of order 1 for each token.
    dloss = torch.tensor(0.7 * T if variant.reduction == "mean" else 0.7)
    if variant.reduction == "none":
        dloss = torch.randn(T, generator=generator)
    return Data(
        hidden=hidden.to(device, dtype),
        weight=weight.to(device, dtype),
        labels=labels.to(device),
        bias=bias.to(device, dtype) if variant.bias else None,
        token_weight=token_weight.to(device) if variant.token_weight else None,
        dloss=dloss.to(device),
        dmetrics=torch.randn(len(METRICS), T, generator=generator).to(device),
        vocab_size=vocab_size,
    )


def _aim(hidden: Tensor, weight: Tensor, labels: Tensor, logits: dict[int, float]) -> None:
    """Give tokens, the keys, these label logits by stretching hidden and weight alike.

    A vector much longer than the others would rule every RMS and hide errors elsewhere. Of tokens
    with one label the last is aimed: an indexed write to one row twice has no order, and the ranks
    would hold different weights.
    """
    last = {label: token for token, label in enumerate(labels.tolist()) if token in logits}
    tokens = torch.tensor(list(last.values()), dtype=torch.long)
    if len(tokens) == 0:
        return
    logit = torch.tensor([logits[token] for token in last.values()])[:, None]
    direction = torch.nn.functional.normalize(hidden[tokens])
    usual_hidden, usual_weight = hidden.shape[1] ** 0.5, 1.5
    stretch = (logit.abs() / (usual_hidden * usual_weight)).sqrt()
    hidden[tokens] = direction * usual_hidden * stretch
    weight[labels[tokens]] = direction * usual_weight * stretch * logit.sign()


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
