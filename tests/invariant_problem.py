"""One problem and its statistics on any number of ranks, bit by bit: for the tests of tp_invariant.

Every shard begins at a multiple of ``INVARIANT_ROWS`` columns. A tile of the interpreter is 32
tokens x 64 columns.
"""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import linear_cross_entropy_with_metrics
from flce_dist.parallel.vocab import INVARIANT_ROWS
from flce_dist.testing import run_ranks
from tests.problems import Inputs, with_logits

T, H, V_ALL, ROWS = 40, 24, 410, 416  # 13 groups of rows, the last with 6 rows of padding


class Statistics(NamedTuple):
    """What must be bitwise invariant; loss is [T] under reduction="none"."""

    loss: Tensor
    lse: Tensor
    logprob: Tensor
    entropy: Tensor


def problem(
    dtype: torch.dtype = torch.float32, T: int = T, H: int = H, V_all: int = V_ALL,
    rows: int = ROWS, spread: float = 6.0,
) -> Inputs:  # fmt: skip
    """Inputs with exponentials of many magnitudes, so that later ones raise the top bin.

    A fifth of the tokens is ignored, of some the hidden state is NaN; a fifth needs the rescue.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator)
    weight = torch.randn(rows, H, generator=generator) * (spread / H**0.5)
    bias = torch.randn(rows, generator=generator)
    bias[::3] -= 40.0
    labels = torch.randint(V_all, (T,), generator=generator)
    hidden[::5] *= 0.1  # nearly flat: every column counts
    hidden[2::5] *= 0.1
    hidden[3::5] *= 8.0
    z = (hidden @ weight.T + bias)[:, :V_all]
    labels[2::5] = z[2::5, : V_all // 2].argmax(1)  # others are below it here, above it elsewhere
    labels[3::5] = z[3::5].argmin(1)
    labels[1::5] = -100
    hidden[1::10] = torch.nan
    weight[V_all:] = torch.nan
    bias[V_all:] = torch.inf
    weights = torch.rand(T, generator=generator)
    hidden, weight, bias = (x.to(dtype) for x in (hidden, weight, bias))
    return Inputs(hidden, weight, labels, bias, weights)


def leading(inputs: Inputs, T: int) -> Inputs:
    """The first T tokens."""
    rows = {name: getattr(inputs, name)[:T] for name in ("hidden", "labels", "token_weight")}
    return replace(inputs, **rows)


def shards(P: int, rows: int, step: int = INVARIANT_ROWS) -> list[tuple[int, int]]:
    """Uneven ranges of rows that begin at multiples of ``step``; small steps leave none empty."""
    groups = -(-rows // step)
    starts = [min(rows, step * (rank * groups // P)) for rank in range(P)] + [rows]
    return list(itertools.pairwise(starts))


def statistics(
    inputs: Inputs, P: int = 1, *, V_all: int = V_ALL, step: int = INVARIANT_ROWS,
    gradients: bool = False, **options: Any,
) -> Statistics:  # fmt: skip
    """Return what every one of P ranks returns, which must be the same."""
    ranges = shards(P, len(inputs.weight), step)

    def rank(tp_group: dist.ProcessGroup) -> Statistics:
        start, end = ranges[tp_group.rank()]
        assert inputs.bias is not None
        weight = inputs.weight[start:end].clone().requires_grad_(gradients)
        share = replace(inputs, weight=weight, bias=inputs.bias[start:end].clone())
        group = tp_group if P > 1 else None
        how = {"reduction": "none", "tp_invariant": True, "impl": "triton", **options}
        rows: dict[str, Any] = {"vocab_size": V_all, "vocab_range": (start, end)}
        out = linear_cross_entropy_with_metrics(**vars(share), **rows, tp_group=group, **how)
        return Statistics(*(x.detach() for x in out[:4]))

    first, *others = run_ranks(rank, P)
    assert all(differing(first, other) == [] for other in others)
    counted = inputs.labels != -100
    return Statistics(first.loss, *(x.where(counted, 0.0) for x in first[1:]))


def differing(one: Statistics, other: Statistics) -> list[str]:
    """Names of what differs in any bit; NaN equals NaN."""
    ints = {4: torch.int32, 8: torch.int64}
    bits = [[x.view(ints[x.element_size()]) for x in each] for each in (one, other)]
    return [name for name, a, b in zip(one._fields, *bits, strict=True) if not torch.equal(a, b)]


def check_small_terms(above: float, nats: float) -> None:
    """Compare with fp64 where one column is ``above`` the label, most others ``nats`` below it."""
    V = 2048
    z = torch.full((2, V), above - nats)
    z[:, 700] = above
    labels = torch.tensor([3, 700])
    z[0, 3] = 0.0
    inputs = with_logits(z, labels)
    out = linear_cross_entropy_with_metrics(
        inputs.hidden, inputs.weight, labels, reduction="none", impl="triton", tp_invariant=True
    )
    z = z.double()
    label = labels[:, None]
    others = (z - z.gather(1, label)).exp().scatter(1, label, 0.0).sum(1)  # without cancellation
    exact = -others.log1p()
    logprob = z.log_softmax(1)
    entropy = -(logprob * logprob.exp()).sum(1)
    torch.testing.assert_close(out.logprob.double(), exact, rtol=4e-6, atol=0.0)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-4, atol=1e-5)
