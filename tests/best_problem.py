"""Small problems of ``linear_top_k``, and their comparison with the reference.

Logits are sums of products of small integers, exact in every dtype and order of additions. So there
are many ties, and ids and ranks must be those of a stable sort on any kernel and number of ranks.
T tokens, V vocabulary rows, H hidden size.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import BestIds, linear_top_k
from flce_dist.parallel.vocab import vocab_range
from flce_dist.reference import reference_linear_top_k
from flce_dist.testing import run_ranks
from tests.invariant_problem import shards
from tests.problems import device_of

T, V, H, IGNORED = 12, 330, 24, (3, 7)


@dataclass(frozen=True)
class Asked:
    """Tensors and options of one call; labels and temperature are among the options."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    k: int | None = 5
    options: dict[str, Any] = field(default_factory=dict)

    def changed(self, **options: Any) -> "Asked":
        return replace(self, options={**self.options, **options})

    def to(self, dtype: torch.dtype) -> "Asked":
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def moved(self, device: torch.device) -> "Asked":
        options = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in self.options.items()}
        bias = None if self.bias is None else self.bias.to(device)
        return Asked(self.hidden.to(device), self.weight.to(device), bias, self.k, options)


def problem(
    dtype: torch.dtype = torch.float32, k: int | None = 5, *, tokens: int = T, rows: int = V,
    labelled: bool = True, seed: int = 0, **options: Any,
) -> Asked:  # fmt: skip
    """Integers, and a bias that bans some columns; ignored tokens have NaN as hidden states."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-2, 3, (tokens, H), generator=g).float()
    weight = torch.randint(-1, 2, (rows, H), generator=g).float()
    bias = torch.randint(-1, 2, (rows,), generator=g).float()
    bias[torch.rand(rows, generator=g) < 0.1] = -torch.inf
    if labelled:
        labels = torch.randint(options.get("vocab_size", rows), (tokens,), generator=g)
        labels[:1] = bias[: options.get("vocab_size", rows)].argmin()  # a banned one
        for t in (t for t in IGNORED if t < tokens):
            labels[t] = -100
            hidden[t] = torch.nan
        options["labels"] = labels
    return Asked(hidden, weight, bias, k, options).to(dtype)


def real_problem(
    dtype: torch.dtype = torch.float32, k: int | None = 5, **options: Any
) -> Asked:  # fmt: skip
    """Random numbers; a sort of logits in another precision may exchange neighbours."""
    g = torch.Generator().manual_seed(1)
    rows = options.pop("rows", V)
    hidden = torch.randn(T, H, generator=g)
    weight = torch.randn(rows, H, generator=g)
    bias = torch.randn(rows, generator=g)
    labels = torch.randint(V, (T,), generator=g)
    return Asked(hidden, weight, bias, k, {"labels": labels, **options}).to(dtype)


def best(asked: Asked, impl: Any = "eager", **options: Any) -> BestIds:
    """Results on the CPU, from the device of ``impl``."""
    there = asked.moved(device_of(impl))
    found = linear_top_k(
        there.hidden, there.weight, there.k, bias=there.bias, impl=impl,
        **{**there.options, **options},
    )  # fmt: skip
    on_cpu: Any = (None if x is None else x.cpu() for x in found)
    return BestIds(*on_cpu)


def reference(asked: Asked) -> BestIds:
    ours = ("sequence_dim", "max_counted", "tp_invariant")
    options = {name: x for name, x in asked.options.items() if name not in ours}
    whole = asked.to(torch.float64)
    return BestIds(
        *reference_linear_top_k(
            whole.hidden, whole.weight, asked.k or 1, bias=whole.bias, **options
        )
    )


def compare(found: BestIds, asked: Asked) -> None:
    """Compare results of exact logits with the reference: ids and ranks must be equal."""
    truth = reference(asked)
    assert (found.ids is None) == (found.logprob is None) == (asked.k is None)
    if found.ids is not None and found.logprob is not None:
        assert equal(found.ids, truth.ids)
        close(found.logprob, truth.logprob)
    close(found.lse, truth.lse)
    assert (found.label_rank is None) == (found.label_logprob is None) == (truth.label_rank is None)
    if truth.label_rank is not None:
        assert equal(found.label_rank, truth.label_rank)
        close(found.label_logprob, truth.label_logprob)


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None and other is not None
    return torch.equal(one, other)


def close(found: Tensor | None, truth: Tensor | None) -> None:
    """Compare numbers; infinities and NaN must be at the same places."""
    assert found is not None and truth is not None
    assert found.shape == truth.shape
    is_number = truth.isfinite()
    assert torch.equal(found.isfinite(), is_number)
    assert torch.equal(found.isnan(), truth.isnan())
    if is_number.any():
        error = (found - truth)[is_number].abs().amax()
        limit = 1e-11 if found.dtype == torch.float64 else 1e-5
        limit *= max(1.0, float(truth[is_number].abs().amax()))
        assert error <= limit, f"error {error:.3g} of fp64 exceeds {limit:g}"


def compare_real(found: BestIds, asked: Asked, nats: float) -> None:
    """Compare results of any logits: ids have the reference's values up to ``nats``."""
    every = reference(replace(asked, k=len(asked.weight)))
    assert every.logprob is not None and every.ids is not None
    assert found.ids is not None and found.logprob is not None and asked.k is not None
    place = every.ids.where(every.ids >= 0, every.ids.shape[-1])  # banned ids behind all others
    at_id = every.logprob.new_empty(*every.ids.shape[:-1], every.ids.shape[-1] + 1)
    at_id.scatter_(-1, place, every.logprob)
    assert (at_id.gather(-1, found.ids) - every.logprob[..., : asked.k]).abs().amax() <= nats
    assert (found.ids.sort(-1).values.diff() > 0).all()
    assert (found.logprob.diff() <= 0).all()
    assert (found.logprob - every.logprob[..., : asked.k]).abs().amax() <= nats
    assert (found.lse - every.lse).abs().amax() <= nats
    assert found.label_rank is not None and every.label_logprob is not None
    assert found.label_logprob is not None
    assert (found.label_logprob - every.label_logprob).abs().amax() <= nats
    of_label = every.label_logprob[..., None]
    least, most = ((every.logprob > of_label + by).sum(-1) for by in (nats, -nats))
    assert ((least <= found.label_rank) & (found.label_rank < most)).all()


def on_ranks(
    asked: Asked, P: int, impl: str = "eager", *, sequence_parallel: bool = False,
    calls: list[Any] | None = None, call: Any = best, **options: Any,
) -> Any:  # fmt: skip
    """Results of P ranks, which must agree bit by bit; ``calls`` receives their collectives."""
    rows = len(asked.weight)

    def rank(group: dist.ProcessGroup) -> Any:
        start, end = vocab_range(rows, group.rank(), P)
        if options.get("tp_invariant"):
            start, end = shards(P, rows)[group.rank()]
        parts = asked.hidden.tensor_split(P, asked.options.get("sequence_dim", 0))
        hidden = parts[group.rank()] if sequence_parallel else asked.hidden
        bias = None if asked.bias is None else asked.bias[start:end]
        mine = replace(asked, hidden=hidden, weight=asked.weight[start:end], bias=bias)
        mine = mine.changed(**{"vocab_size": rows, **asked.options}, vocab_range=(start, end))
        found = call(mine, impl, tp_group=group, sequence_parallel=sequence_parallel, **options)
        return found, tuple(getattr(group, "calls", ()))

    results = run_ranks(rank, P)
    for found, called in results:
        assert called == results[0][1]
        assert same_bits(found, results[0][0])
    if calls is not None:
        calls.extend(results[0][1])
    return results[0][0]


def same_bits(one: Any, other: Any) -> bool:
    pairs = list(zip(one, other, strict=True))
    assert all((a is None) == (b is None) for a, b in pairs)
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs if a is not None)


def bits(x: Tensor) -> Tensor:
    return x.view({4: torch.int32, 8: torch.int64}[x.element_size()])
