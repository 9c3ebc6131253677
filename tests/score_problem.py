"""Small problems of ``linear_logprob``, and their comparison with the reference.

T tokens, V_all vocabulary rows, H hidden size, K ids per token, N ids of all.
"""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import linear_logprob
from flce_dist.parallel.vocab import vocab_range
from flce_dist.reference import reference_linear_logprob
from flce_dist.testing import error_budget, relative_rms, run_ranks
from tests.outcomes import Outcome, Results, other_names, without_infinities
from tests.parallel_problem import joined
from tests.problems import device_of

SCORES = ("logprob", "lse", "other", "entropy")
T, V, H, K = 24, 150, 32, 5

each_over = pytest.mark.parametrize("over", ["vocabulary", "ids"])


@dataclass(frozen=True)
class Scored:
    """Tensors and options of one call; ``upstream`` are gradients by name of scores.

    ``trained`` names the operands that need a gradient.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor
    options: dict[str, Any]
    upstream: dict[str, Tensor]
    trained: tuple[str, ...] = ("hidden", "weight", "bias")

    def to(self, dtype: torch.dtype) -> "Scored":
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def changed(self, **options: Any) -> "Scored":
        return replace(self, options={**self.options, **options})


def problem(
    dtype: torch.dtype = torch.float32, *, ids: Tensor | None = None,
    scores: Collection[str] | None = None, rows: int = V, seed: int = 0, **options: Any,
) -> Scored:  # fmt: skip
    """Each row has a repeated id, some padding; token 3 has no ids and NaN as hidden state.

    ``scores`` are those that have an upstream gradient: all that the options give, by default.
    """
    if scores is None:
        scores = scores_of({"with_entropy": True, **options})
    g = torch.Generator().manual_seed(seed)
    n_tokens = T
    if ids is None:
        ids = torch.randint(V, (T, K), generator=g)
        ids[:, 2] = ids[:, 0]
        ids[torch.rand(T, K, generator=g) < 0.2] = -1
        ids[3] = -1
        ids[0] = torch.tensor([V - 1, 0, V // 2, 0, -1])
    elif "offsets" in options:
        n_tokens = len(options["offsets"]) - 1
    else:
        n_tokens = ids.shape[:-1].numel()
    hidden = torch.randn(n_tokens, H, generator=g)
    if "offsets" not in options:
        hidden = hidden.view(*ids.shape[:-1], H)
        hidden[(ids < 0).all(-1)] = torch.nan
    weight = torch.randn(rows, H, generator=g) * (2 / H**0.5)
    bias = torch.randn(rows, generator=g)
    tokens = hidden.shape[:-1]
    shapes = {name: ids.shape if name == "logprob" else tokens for name in scores}
    upstream = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    options.setdefault("with_entropy", "entropy" in scores)
    return Scored(hidden, weight, bias, ids, options, upstream).to(dtype)


def scores_of(options: Mapping[str, Any]) -> list[str]:
    """What a call with these options returns."""
    has = {
        "other": options.get("over") != "ids",
        "entropy": options.get("with_entropy", False),
    }
    return [name for name in SCORES if has.get(name, True)]


def run(call: Any, given: Scored, **options: Any) -> Outcome:
    """Scores, and the gradients of all of them together."""
    leaves = {
        name: getattr(given, name).detach().clone().requires_grad_(name in given.trained)
        for name in ("hidden", "weight", "bias")
        if getattr(given, name) is not None
    }
    out = call(ids=given.ids, **leaves, **given.options, **options)
    results = Outcome({k: x for k, x in zip(SCORES, out, strict=True) if x is not None})
    heads = [results[name] for name in given.upstream]
    gradients = [g.to(head) for head, g in zip(heads, given.upstream.values(), strict=True)]
    torch.autograd.backward(heads, gradients)
    results.update({name: x.detach() for name, x in results.items()})
    return results.changed(**{f"d{k}": x.grad for k, x in leaves.items() if x.grad is not None})


def run_scores(given: Scored, impl: str, **options: Any) -> Outcome:
    device = device_of(impl)

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    moved_options = {name: moved(x) for name, x in given.options.items()}
    tensors = {name: moved(getattr(given, name)) for name in ("hidden", "weight", "bias", "ids")}
    there = replace(given, options=moved_options, **tensors)
    results = run(linear_logprob, there, impl=impl, **options)
    return Outcome({name: x.cpu() for name, x in results.items()})


def run_reference(given: Scored) -> Outcome:
    names = (
        "with_entropy", "sequence_dim", "sequence_parallel", "schedule", "max_logits_bytes",
        "reduce_in_fp32", "tp_invariant",
    )  # fmt: skip
    options = {k: x for k, x in given.options.items() if k not in names}
    return run(reference_linear_logprob, replace(given, options=options))


def compare(actual: Results, given: Scored, *, without: Collection[str] = ()) -> None:
    """Compare all results but those ``without`` with fp64; an AssertionError names the result."""
    of_call = scores_of(given.options)
    others = [name for name in SCORES if name not in of_call]
    truth = run_reference(given.to(torch.float64)).without(*others, *without)
    eager = run_reference(given)
    for miss in other_names(actual, truth):
        raise AssertionError(miss)
    for name, result in actual.items():
        result, expected = without_infinities(name, result, truth[name])
        if given.hidden.dtype == torch.float64:
            assert relative_rms(result, expected) <= 1e-11, name
        elif name.startswith("d"):
            assert result.dtype == given.hidden.dtype
            budget = error_budget(result, expected, eager[name], dtype=result.dtype)
            assert budget.met, f"{name}: {budget}"
        else:
            assert result.dtype == torch.float32
            error = relative_rms(result, expected)
            assert error <= 1e-5, f"{name}: error {error:.3g} of fp64 exceeds 1e-5"


def check(given: Scored, impl: str, **options: Any) -> Outcome:
    actual = run_scores(given, impl, **options)
    compare(actual, given)
    return actual


def of_ranks(
    given: Scored, P: int, impl: str = "eager", *, cuts: tuple[int, ...] = (), **options: Any
) -> list[Outcome]:
    """Results of each of P ranks, with its ``calls``; shards are even, or end at ``cuts``."""
    n_rows = len(given.weight)
    split = options.get("sequence_parallel", False)
    rows = [vocab_range(n_rows, rank, P) for rank in range(P)]
    if cuts:
        rows = list(itertools.pairwise((0, *cuts, n_rows)))

    def one(group: dist.ProcessGroup) -> Outcome:
        start, end = rows[group.rank()]
        parts = given.hidden.tensor_split(P, options.get("sequence_dim", 0))
        hidden = parts[group.rank()] if split else given.hidden
        bias = None if given.bias is None else given.bias[start:end]
        mine = replace(given, hidden=hidden, weight=given.weight[start:end], bias=bias)
        mine = mine.changed(**{"vocab_size": n_rows, **given.options})
        found = run_scores(mine, impl, tp_group=group, vocab_range=(start, end), **options)
        return found.changed(calls=tuple(getattr(group, "calls", ())))

    return run_ranks(one, P)


def on_ranks(given: Scored, P: int, impl: str = "eager", **options: Any) -> Outcome:
    """Results of P ranks, joined; they must agree in scores, bit by bit, and in collectives."""
    ranks = of_ranks(given, P, impl, **options)
    found = joined(ranks, sequence_parallel=options.get("sequence_parallel", False))
    found.pop("calls")
    return found
