"""One problem, whole and by ranks: what the tests of parallel runs share."""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import api
from flce_dist.arguments.decided_once import calls
from flce_dist.core.call import Call
from flce_dist.parallel.vocab import vocab_range
from flce_dist.schedules import fit
from flce_dist.schedules.in_forward import InForward
from flce_dist.testing import run_ranks
from tests import outcomes
from tests.outcomes import Outcome
from tests.problems import METRICS, Inputs, Upstream, run_reference

GRADIENTS = ("dhidden", "dweight", "dbias")


@dataclass(frozen=True)
class Problem:
    """Whole inputs of a loss, drawn on the CPU. ``rows`` of the weight beyond V_all are padding.

    A bias of -inf bans a share of the columns, also some tokens' labels.
    """

    T: int = 24
    H: int = 32
    V_all: int = 507
    rows: int = 0  # 0: V_all
    dtype: torch.dtype = torch.float32
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    ignored: float = 0.2
    banned: float = 0.0
    device: str | torch.device = "cpu"

    def changed(self, **changes: Any) -> "Problem":
        return replace(self, **changes)

    @property
    def n_rows(self) -> int:
        return self.rows or self.V_all

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [T, H], weight [rows, H], bias [rows], labels [T]."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden = torch.randn(self.T, self.H, generator=generator)
        weight = torch.randn(self.n_rows, self.H, generator=generator) * (1.5 / self.H**0.5)
        bias = torch.randn(self.n_rows, generator=generator)
        labels = torch.randint(self.V_all, (self.T,), generator=generator)
        labels[torch.rand(self.T, generator=generator) < self.ignored] = -100
        weight[self.V_all :] *= 50.0
        bias[torch.rand(self.n_rows, generator=generator) < self.banned] = -torch.inf
        hidden, weight, bias = (x.to(self.device, self.dtype) for x in (hidden, weight, bias))
        return hidden, weight, bias, labels.to(self.device)

    @cached_property
    def upstream(self) -> Tensor:
        """Gradient of the loss: a scalar, or one per token under reduction="none"."""
        if self.options.get("reduction") != "none":
            return torch.tensor(0.7 * max(1, self.T), device=self.device)
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.T, generator=generator).to(self.device)

    def textbook(self, dtype: torch.dtype) -> Outcome:
        """Loss and gradients of the reference in ``dtype``."""
        hidden, weight, bias, labels = self.tensors
        options = {"vocab_size": self.V_all, **self.options}
        of_tokens = options.pop("token_weight", None), options.pop("temperature", 1.0)
        inputs = Inputs(hidden, weight, labels, bias, *of_tokens)
        return run_reference(inputs.to(dtype), Upstream(self.upstream), **options)

    @cached_property
    def truth(self) -> tuple[Outcome, Outcome]:
        """In fp64, and of eager PyTorch in the dtype under test."""
        return self.textbook(torch.float64), self.textbook(self.dtype)


class Share(NamedTuple):
    """A rank's own copies of its operands, and all labels."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor
    vocab_range: tuple[int, int]

    def leaves(self, frozen: Collection[str] = ()) -> list[Tensor]:
        """Return hidden, weight and bias; those that are not ``frozen`` require gradients."""
        return [getattr(self, x).requires_grad_(x not in frozen) for x in self._fields[:3]]

    def loss(
        self, group: dist.ProcessGroup | None, problem: Problem, *,
        call: Callable[..., Any] | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Of the op, or of what ``call`` makes of it."""
        return (call or api.linear_cross_entropy)(
            self.hidden, self.weight, self.labels, bias=self.bias, vocab_size=problem.V_all,
            vocab_range=self.vocab_range, tp_group=group, **{**problem.options, **options},
        )  # fmt: skip


def share_of(
    group: dist.ProcessGroup | None, problem: Problem, *, sequence_parallel: bool
) -> Share:
    """Cut ``problem`` as ``vocab_range`` does and take what this rank holds."""
    rank, P = (0, 1) if group is None else (group.rank(), group.size())
    hidden, weight, bias, labels = problem.tensors
    start, end = vocab_range(problem.n_rows, rank, P)
    if sequence_parallel:
        hidden = hidden.tensor_split(P)[rank]
    return Share(
        hidden.clone(), weight[start:end].clone(), bias[start:end].clone(), labels.clone(),
        (start, end),
    )  # fmt: skip


def rank_step(
    group: dist.ProcessGroup | None, problem: Problem, *, upstream_factor: float = 1.0,
    frozen: Collection[str] = (), **options: Any,
) -> Outcome:  # fmt: skip
    """Loss and gradients of this rank's share of ``problem``; zeros for operands in ``frozen``."""
    sequence_parallel = options.get("sequence_parallel", False)
    share = share_of(group, problem, sequence_parallel=sequence_parallel)
    leaves = share.leaves(frozen)
    loss = share.loss(group, problem, **options)
    if loss.requires_grad:
        loss.backward(problem.upstream.to(loss.dtype) * upstream_factor)
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return Outcome.of(loss, *gradients, calls=tuple(getattr(group, "calls", ())))


def joined(ranks: Sequence[Outcome], *, sequence_parallel: bool) -> Outcome:
    """Join what ranks have parts of; check that they agree on all else, tensors bitwise."""
    split = ("dweight", "dbias", "dhidden") if sequence_parallel else ("dweight", "dbias")
    found = ranks[0].changed()
    assert all(rank.keys() == found.keys() for rank in ranks), "results differ between ranks"
    for name, first in found.items():
        every = [rank[name] for rank in ranks]
        if name in split:
            found[name] = torch.cat(every)
        else:
            equal = torch.equal if isinstance(first, Tensor) else operator.eq
            assert all(equal(x, first) for x in every), f"{name} differs between ranks"
    return found


def misses(
    outcome: Outcome, problem: Problem, tokens: Any = slice(None), rows: slice = slice(None)
) -> list[str]:
    """Return which of loss and gradients are missing, or further from fp64 than they may be.

    ``outcome`` has the gradients of these tokens and rows.
    """
    truth, eager = (whole.part(tokens, rows) for whole in problem.truth)
    truth = truth.without(*METRICS, "correct")
    return outcomes.misses(outcome, truth, eager, problem.dtype)


def complaint(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What a ValueError of this call says; nothing if there is none."""
    try:
        call(*args, **options)
    except ValueError as error:
        return str(error)
    return ""


SCHEDULES = ["recompute", "cached", "in_forward", "auto"]
EVEN, UNEVEN = Problem(V_all=512), Problem(V_all=507)
PADDED = Problem(V_all=500, rows=512)
TINY = Problem(V_all=9)  # over 4: 3, 3, 3, 0 rows; over 8: 2, 2, 2, 2, 1, 0, 0, 0


def on_threads(P: int, problem: Problem, **options: Any) -> Outcome:
    ranks = run_ranks(lambda group: rank_step(group, problem, **options), P)
    return joined(ranks, sequence_parallel=options.get("sequence_parallel", False))


@contextmanager
def plan_sizes(**sizes: float) -> Iterator[dict[Any, Call]]:
    """Plan with other sizes, as ``tile=8, min_window=8``; yields calls so planned."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(fit, f"_{name.upper()}", value)
        calls.clear()
        yield calls
    calls.clear()


def chunks_of(chosen: fit.Plan) -> list[tuple[int, int]]:
    return chosen.chunks() if isinstance(chosen, InForward) else [(0, chosen.T)]


IN_CHUNKS = Problem(T=48)
FEW_BYTES = {"max_logits_bytes": 9_000}  # in_forward: several chunks
small_chunks = partial(plan_sizes, tile=8, min_window=8)
"""Plan several chunks for a problem of few tokens."""
