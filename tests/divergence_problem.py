"""Small problems of ``linear_divergence``, and their comparison with the reference.

T tokens, V vocabulary rows, H and H_T hidden sizes of student and teacher, P ranks.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import linear_divergence, linear_divergence_with_metrics
from flce_dist.parallel.vocab import vocab_range
from flce_dist.reference import reference_linear_divergence
from flce_dist.testing import run_ranks
from tests.outcomes import Outcome, Results, misses
from tests.parallel_problem import joined
from tests.problems import IGNORE, device_of, per_token_upstream

KINDS = ["forward_kl", "reverse_kl", "jsd", "tv"]
METRICS = ("own_entropy", "teacher_entropy", "correct", "overlap")  # correct: same_best
T, V, H, H_T = 37, 150, 32, 48

WAYS: list[dict[str, Any]] = [
    {"reduction": "mean"},
    {"reduction": "sum", "max_logits_bytes": 1},
    {"reduction": "none"},
    {"reduction": "none", "schedule": "recompute"},
    {"reduction": "mean", "schedule": "cached"},
]

each_kind = pytest.mark.parametrize("kind", KINDS)
each_way = pytest.mark.parametrize("how", WAYS, ids=str)

_OURS = (
    "schedule",
    "max_logits_bytes",
    "max_counted",
    "skip_ignored",
    "with_metrics",
    "impl",
    "sequence_dim",
    "tp_invariant",
)


@dataclass(frozen=True)
class Pair:
    """Tensors and options of one call, the operands in the dtype under test."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    bias: Tensor | None
    teacher_bias: Tensor | None
    options: Mapping[str, Any]

    @property
    def operands(self) -> dict[str, Any]:
        names = (f"{model}{x}" for model in ("", "teacher_") for x in ("hidden", "weight", "bias"))
        tensors = {name: getattr(self, name) for name in names}
        return {name: x for name, x in tensors.items() if x is not None}

    def to(self, target: torch.dtype | torch.device) -> "Pair":
        """Operands in another dtype, or everything on another device."""
        options = self.options
        if isinstance(target, torch.device):
            options = {k: x.to(target) if isinstance(x, Tensor) else x for k, x in options.items()}
        moved = {name: x.to(target) for name, x in self.operands.items()}
        return replace(self, options=options, **moved)

    def changed(self, **options: Any) -> "Pair":
        return replace(self, options={**self.options, **options})


def problem(
    dtype: torch.dtype = torch.float32,
    *,
    rows: int = V,
    teacher_rows: int | None = None,
    tokens: tuple[int, ...] = (T,),
    spread: float = 2.0,
    seed: int = 0,
    bias: bool = True,
    ignored: float = 0.2,
    **options: Any,
) -> Pair:
    """Of random models; ignored tokens have NaN as one of the two hidden states, in turns."""
    g = torch.Generator().manual_seed(seed)
    teacher_rows = rows if teacher_rows is None else teacher_rows
    labels = torch.randint(V, tokens, generator=g)
    labels[torch.rand(tokens, generator=g) < ignored] = IGNORE
    hidden, teacher_hidden = (torch.randn(*tokens, n, generator=g) for n in (H, H_T))
    places = (labels == IGNORE).nonzero().unbind(1)
    for i, x in enumerate((hidden, teacher_hidden)):
        x[tuple(place[i::2] for place in places)] = torch.nan
    shapes = (rows, H), (teacher_rows, H_T)
    weight, teacher_weight = (spread * torch.randn(n, h, generator=g) / h**0.5 for n, h in shapes)
    own, other = (torch.randn(n, generator=g) if bias else None for n in (rows, teacher_rows))
    options = {"labels": labels, **options}
    return Pair(hidden, weight, teacher_hidden, teacher_weight, own, other, options).to(dtype)


def run(call: Any, given: Pair, upstream: Tensor | None = None, **options: Any) -> Outcome:
    """The loss, any metrics, and the gradients of the student's operands."""
    leaves = {
        name: x.detach().clone().requires_grad_(not name.startswith("teacher_"))
        for name, x in given.operands.items()
    }
    out = call(**leaves, **given.options, **options)
    results = Outcome(zip(("loss", *METRICS), out, strict=False))
    loss = results["loss"]
    g = torch.ones_like(loss) if upstream is None else upstream.to(loss).view(loss.shape)
    loss.backward(g)
    results.update({name: x.detach() for name, x in results.items()})
    return results.changed(
        **{f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}
    )


def upstream_of(given: Pair) -> Tensor | None:
    """Different for each token without reduction."""
    if given.options.get("reduction", "mean") != "none":
        return None
    tokens = given.hidden.shape[:-1]
    return per_token_upstream(tokens.numel()).view(tokens)


def run_op(given: Pair, impl: str, **options: Any) -> Outcome:
    """Run the op on the device of ``impl``; return results on the CPU."""

    def call(with_metrics: bool = False, **keywords: Any) -> tuple[Tensor, ...]:
        if with_metrics:
            return linear_divergence_with_metrics(**keywords)
        return (linear_divergence(**keywords),)

    upstream = options.pop("upstream", None)
    upstream = upstream_of(given) if upstream is None else upstream
    results = run(call, given.to(device_of(impl)), upstream, impl=impl, **options)
    return Outcome({name: x.cpu() for name, x in results.items()})


def run_reference(given: Pair, upstream: Tensor | None = None) -> Outcome:
    options = {name: x for name, x in given.options.items() if name not in _OURS}
    upstream = upstream_of(given) if upstream is None else upstream
    return run(reference_linear_divergence, replace(given, options=options), upstream)


def compare(
    actual: Results, given: Pair, *, with_metrics: bool = False, without: Collection[str] = ()
) -> None:
    """Compare all results but those ``without`` with fp64; an AssertionError names the result."""
    truth = run_reference(given.to(torch.float64)).without(*without)
    if not with_metrics:
        truth = truth.without(*METRICS)
    eager = run_reference(given)
    for miss in misses(actual, truth, eager, given.hidden.dtype):
        raise AssertionError(miss)


def check(given: Pair, impl: str = "eager", **options: Any) -> Outcome:
    actual = run_op(given, impl, **options)
    compare(actual, given, with_metrics=options.get("with_metrics", False))
    return actual


def of_ranks(given: Pair, P: int, impl: str = "eager", **options: Any) -> list[Outcome]:
    """Results of each of P ranks, with its ``calls``."""
    n_rows = len(given.weight)
    split = options.get("sequence_parallel", False)

    def one(group: dist.ProcessGroup) -> Outcome:
        start, end = vocab_range(n_rows, group.rank(), P)
        mine: dict[str, Any] = {}
        for name, x in given.operands.items():
            if name.endswith("hidden"):
                parts = x.tensor_split(P, options.get("sequence_dim", 0)) if split else [x] * P
                mine[name] = parts[group.rank()]
            else:
                mine[name] = x[start:end]
        part = replace(given, **mine).changed(**{"vocab_size": n_rows, **given.options})
        upstream = upstream_of(given)
        found = run_op(
            part, impl, tp_group=group, vocab_range=(start, end), upstream=upstream, **options
        )
        return found.changed(calls=tuple(getattr(group, "calls", ())))

    return run_ranks(one, P)


def on_ranks(given: Pair, P: int, impl: str = "eager", **options: Any) -> Outcome:
    """Results of P ranks, joined, with their ``calls``; the ranks must agree in loss and metrics,
    bit by bit, and in collectives.
    """
    ranks = of_ranks(given, P, impl, **options)
    return joined(ranks, sequence_parallel=options.get("sequence_parallel", False))
