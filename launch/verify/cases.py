"""What ``verify`` runs: the variants of the loss, and the ways to compute them.

T = tokens, H = hidden size, V_all = true vocabulary, P = ranks.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from flce_dist import plan
from flce_dist.arguments.options import Over, Reduction, ScheduleName
from flce_dist.launch.ranges import Range

METRICS = ("lse", "logprob", "entropy")
VOCABULARY = Range("within [10, 2**31)", lambda x: 10 <= x < 2**31)
"""Once padded, the least one has an entry more than the different ids of a token's scores."""
TOKENS = Range("within [16, 2**31)", lambda x: 16 <= x < 2**31)
"""Of fewer too few count, and are like most, to tell what errors are usual."""
FILTER_EPS = 0.08
"""The largest probabilities of tiles are below half of it or above twice."""


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
    tempered: bool = False  # each token has a temperature
    metrics: bool = False
    padding: int = 0  # rows of the weight beyond the vocabulary
    uneven: bool = False  # shards of different lengths, given by vocab_range
    counted: bool = False  # most tokens are ignored, and max_counted says how many are not
    skips: bool = False  # most tokens are ignored, and skip_ignored is set
    filtered: bool = False  # by filter_eps, on data of which some tiles are not kept
    trained: tuple[str, ...] = ("hidden", "weight", "bias")  # operands that need a gradient
    low_rank: bool = False  # the last half of the weight's columns alone is trained
    over: Over | None = None  # scores at ids instead of a loss
    entropy: bool = True  # among scores
    best: int = 0  # so many best ids of each token, ranks and samples instead of a loss
    divergence: str | None = None  # its kind, from a teacher, instead of a loss

    @property
    def title(self) -> str:
        return f"{self.name} ({self.reduction})"

    @property
    def has_frozen_head(self) -> bool:
        """Whether forward makes the gradient of hidden, whatever the upstream gradients are."""
        of_one_vector = not self.metrics if self.over is None else not self.entropy
        return self.trained == ("hidden",) and of_one_vector


@dataclass(frozen=True)
class Case:
    """One way to compute a variant."""

    variant: Variant
    schedule: ScheduleName
    sequence_parallel: bool
    max_logits_bytes: int | None = None  # if given, a budget that not all columns fit into
    filter_eps: float | None = None

    @property
    def name(self) -> str:
        is_filtered = self.filter_eps is not None
        words = [f"eps={self.filter_eps:g}" if is_filtered else str(self.schedule)]
        if self.max_logits_bytes is not None:
            words.append("rounds" if is_filtered else "part cached")
        return ", ".join([*words, "SP"] if self.sequence_parallel else words)

    @property
    def metric_gradients(self) -> bool:
        """Whether lse, logprob and entropy get upstream gradients too."""
        return self.variant.over is not None or (
            self.variant.metrics
            and self.variant.divergence is None
            and self.schedule != "in_forward"
            and self.filter_eps is None
        )


def variants() -> list[Variant]:
    """Every reduction, then each option by itself, then many together."""
    smoothing = ("label_smoothing", 0.1)
    z_loss = ("z_loss_weight", 1e-3)
    softcap = ("softcap", 15.0)
    scale = ("logit_scale", 0.7)
    return [
        Variant("plain", "mean"),
        Variant("plain", "sum"),
        Variant("plain", "none"),
        Variant("label_smoothing", options=(smoothing,)),
        Variant("z_loss_weight", options=(z_loss,)),
        Variant("softcap", options=(softcap,)),
        Variant("softcap, label_smoothing", options=(softcap, smoothing)),
        Variant("logit_scale", options=(scale,)),
        Variant("temperature", options=(("temperature", 0.7),), metrics=True, bias=True),
        Variant("softcap, temperatures", options=(softcap,), tempered=True),
        Variant("bias", bias=True),
        Variant("token_weight", token_weight=True),
        Variant("metrics", metrics=True),
        Variant("padded vocabulary", padding=5),
        Variant("uneven shards", uneven=True),
        Variant("max_counted", counted=True, token_weight=True, tempered=True),
        Variant("max_counted", "none", counted=True, metrics=True, bias=True, uneven=True),
        Variant("skip_ignored", skips=True, bias=True, token_weight=True, options=(smoothing,)),
        Variant("max_counted, skip_ignored", "none", counted=True, skips=True, metrics=True),
        Variant(
            "many together", "none", options=(smoothing, z_loss, scale), bias=True,
            token_weight=True, tempered=True, metrics=True, padding=5, uneven=True,
        ),
        Variant("frozen head", trained=("hidden",)),
        Variant(
            "frozen head, options", "none", options=(smoothing, z_loss, scale), bias=True,
            token_weight=True, tempered=True, padding=5, uneven=True, trained=("hidden",),
        ),
        Variant("frozen head, metrics", "none", metrics=True, bias=True, trained=("hidden",)),
        Variant("low rank", bias=True, low_rank=True, options=(smoothing,)),
        Variant(
            "low rank, options", "sum", options=(softcap, scale), token_weight=True, tempered=True,
            padding=5, uneven=True, low_rank=True,
        ),
        Variant("weight alone", bias=True, trained=("weight",)),
        Variant("bias alone", "none", bias=True, trained=("bias",)),
        Variant("no gradients", bias=True, trained=()),
    ]  # fmt: skip


def score_variants() -> list[Variant]:
    """Scores at five ids of each token, with all of their gradients."""
    softcap = ("softcap", 15.0)
    scores = Variant("scores", "none", bias=True, over="vocabulary")
    return [
        Variant("scores", "none", over="vocabulary"),
        Variant(
            "scores, options", "none", options=(softcap, ("logit_scale", 0.7)), bias=True,
            tempered=True, padding=5, uneven=True, over="vocabulary",
        ),
        Variant("scores over ids", "none", bias=True, tempered=True, uneven=True, over="ids"),
        replace(scores, name="scores, frozen head", trained=("hidden",), entropy=False),
        Variant(
            "scores, frozen head, options", "none", options=(softcap, ("logit_scale", 0.7)),
            bias=True, tempered=True, padding=5, uneven=True, over="vocabulary",
            trained=("hidden",), entropy=False,
        ),
        replace(scores, name="scores, frozen head, entropy", trained=("hidden",)),
        replace(scores, name="scores, weight alone", trained=("weight",)),
        replace(scores, name="scores, bias alone", trained=("bias",)),
        replace(scores, name="scores, no gradients", trained=()),
    ]  # fmt: skip


def best_variants() -> list[Variant]:
    """The argmax, and more ids than the smallest shards have rows."""
    return [
        Variant("best id", "none", best=1),
        Variant(
            "best ids", "none", options=(("softcap", 15.0), ("logit_scale", 0.7)), bias=True,
            tempered=True, padding=5, uneven=True, best=100,
        ),
    ]  # fmt: skip


def divergence_variants() -> list[Variant]:
    """Each kind, then each way to reduce, with many options."""
    softcap = ("softcap", 15.0)
    scale = ("logit_scale", 0.7)
    theirs = ("teacher_softcap", 20.0), ("teacher_logit_scale", 1.2)
    small = Variant("", divergence="reverse_kl", options=(("temperature", 2.0),))
    many = replace(small, options=(softcap, scale, *theirs), bias=True, tempered=True)
    return [
        replace(small, name="forward_kl", divergence="forward_kl"),
        replace(small, name="reverse_kl"),
        replace(small, name="jsd", divergence="jsd", metrics=True),
        replace(small, name="tv", divergence="tv", reduction="sum"),
        replace(many, name="jsd, options", divergence="jsd", reduction="none", padding=5),
        replace(many, name="reverse_kl, uneven", uneven=True, token_weight=True, skips=True),
        replace(many, name="forward_kl, max_counted", divergence="forward_kl", counted=True),
    ]


def filtered_variants() -> list[Variant]:
    """What the two rank-one GEMMs and the lists of tiles must get right, together."""
    options = ("label_smoothing", 0.1), ("z_loss_weight", 1e-3), ("logit_scale", 1.1)
    return [
        Variant("filter_eps", filtered=True),
        Variant("filter_eps, options", "sum", options=options, bias=True, filtered=True),
        Variant(
            "filter_eps, uneven", "none", token_weight=True, tempered=True, metrics=True, padding=5,
            uneven=True, filtered=True,
        ),
    ]  # fmt: skip


def filtered_shape(P: int) -> Shape:
    """Return three blocks of tokens, and nine tiles of each shard; the last ones are not full.

    So few tokens are gathered at once, hence in the caller's order.
    """
    return Shape(300, 128, 2100 * P)


def default_shapes(device_type: str, P: int) -> tuple[Shape, ...]:
    """Return a plain shape, an odd one, and one of so many columns that a budget can divide them.

    The plan never makes the window of recomputed columns narrower to cache a part of few columns.
    """
    wide = Shape(16, 64, 36864 * P)
    if device_type == "cuda":
        return Shape(1024, 1024, 32000), Shape(129, 123, 5003), wide
    return Shape(64, 256, 1000), Shape(33, 123, 507), wide


def part_cached_budget(shape: Shape, P: int, dtype: torch.dtype) -> int | None:
    """Return the middle one of the budgets with which ``cached`` caches only some columns."""
    T = round_up(shape.T, P)
    V = round_up(shape.V_all, P) // P
    itemsize = dtype.itemsize
    sizes = (T, shape.H), (V, shape.H), (T,)
    asked = [columns * T * itemsize for columns in range(256, 2 * V, 256)]
    plans = [plan(*sizes, dtype=dtype, schedule="cached", max_logits_bytes=n) for n in asked]
    budgets = [x.logits_bytes for x in plans if 0 < x.cached_columns < V]
    return budgets[len(budgets) // 2] if budgets else None


def cases(
    variant: Variant, schedules: tuple[ScheduleName, ...], P: int, part_cached: int | None
) -> Iterator[Case]:
    """Yield every supported way to compute ``variant`` on P ranks.

    ``part_cached`` comes from ``part_cached_budget``. Filtered gradients are computed in one round
    and, of the first variant, in several, and with every tile kept.
    """
    for schedule, split in itertools.product(schedules, (False, True) if P > 1 else (False,)):
        case = Case(variant, schedule, split)
        if variant.filtered:
            yield from _filtered_cases(case)
        elif variant.best:
            if schedule == "cached":  # there is one way
                yield replace(case, schedule="auto")
        elif variant.over is not None:
            yield from _score_cases(case)
        else:
            yield from _loss_cases(case, part_cached)


def _filtered_cases(case: Case) -> Iterator[Case]:
    if case.schedule != "recompute":
        return
    yield replace(case, filter_eps=FILTER_EPS)
    if case.variant.name == "filter_eps":
        yield replace(case, filter_eps=FILTER_EPS, max_logits_bytes=1)
        yield replace(case, filter_eps=0.0)


def _score_cases(case: Case) -> Iterator[Case]:
    if case.variant.over == "ids":
        if case.schedule == "cached":  # there is one way
            yield replace(case, schedule="auto")
    elif case.schedule in ("recompute", "cached") or case.variant.has_frozen_head:
        yield case


def _loss_cases(case: Case, part_cached: int | None) -> Iterator[Case]:
    variant = case.variant
    needs_logits = {"softcap", "label_smoothing"} <= dict(variant.options).keys()
    if needs_logits and case.schedule in ("cached", "in_forward"):
        return
    per_token = variant.reduction == "none" and bool(variant.trained)
    if case.schedule == "in_forward" and per_token and not variant.has_frozen_head:
        return
    yield case
    if case.schedule == "cached" and variant.name == "plain" and part_cached is not None:
        yield replace(case, max_logits_bytes=part_cached)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
