"""Check of filtered gradients on several ranks; the same kind as in parallel_checks.py."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flce_dist import filtered, linear_cross_entropy_with_metrics
from flce_dist.op.plan import pieces
from flce_dist.parallel.token_order import TokenOrder
from flce_dist.parallel.vocab import vocab_range
from tests import filtered_formula
from tests.parallel_problem import GRADIENTS, Problem
from tests.parallel_ranks import (
    Options,
    Ranks,
    Truth,
    differing,
    misses_of_share,
    other_work,
    outcome,
    plan_of,
    problem,
    said,
    same_on_all_ranks,
    step,
)
from tests.problems import Inputs, Upstream


def filtered_gradients(ranks: Ranks) -> Iterator[str]:
    """Filtered: what is defined on all ranks' tensors, one kept_share, the same bits again."""
    one = problem(ranks.device) if ranks.on_gpu else problem(ranks.device, T=360, V_all=2856)
    V_all = one.V_all - 61
    one = one.changed(V_all=V_all)
    labels = one.tensors[3]
    labels[labels >= 0] %= V_all // 4  # else each tile holds a label of each block
    exact, eps = Truth.of(one), 640 / V_all
    rounds = {"max_logits_bytes": one.T * one.dtype.itemsize * (V_all // ranks.P // 3)}
    ways_filtered: dict[str, Options] = {"one round": {}, "rounds": rounds}
    truths = {
        sp: filtered_truth(exact, one, ranks.P, eps, sequence_parallel=sp) for sp in (False, True)
    }
    for way, options in ways_filtered.items():
        for sp, truth in truths.items():
            given: Options = {
                "sequence_parallel": sp,
                "schedule": filtered.schedule(eps),
                **options,
            }
            mine = step(ranks, one, **given)
            found = misses_of_share(truth, mine, one, ranks.group, sp)
            share = kept_share(ranks, one, **given)
            if not 0.01 < share < 0.99:
                found.append(f"kept_share is {float(share)}")
            if not same_on_all_ranks(share, ranks.group):
                found.append("kept_share differs between ranks")
            yield from said(way, sp, found)
            for repeat in range(2):
                with other_work(ranks, repeat):
                    again = step(ranks, one, **given)
                yield from differing(f"{way}, repeat {repeat}", sp, again, mine)


def filtered_truth(
    exact: Truth, one: Problem, P: int, eps: float, *, sequence_parallel: bool
) -> Truth:
    """Gradients as defined on all ranks' tensors, which have the budgets of exact ones."""
    hidden, weight, bias, labels = one.tensors
    P_gathered = P if sequence_parallel else 1
    order = TokenOrder(P_gathered, pieces(plan_of(one, P, {"schedule": "recompute"}), P_gathered))
    gradients = filtered_formula.filtered_gradients(
        Inputs(hidden, weight, labels, bias),
        eps,
        Upstream(one.upstream),
        shard_starts=[vocab_range(one.n_rows, rank, P)[0] for rank in range(P)],
        token_order=order.permuted(torch.arange(one.T, device=labels.device)),
    )
    defined = tuple(gradients[name] for name in GRADIENTS)
    rounded = [
        x + (getattr(exact.eager, name) - getattr(exact.oracle, name))
        for name, x in zip(GRADIENTS, defined, strict=True)
    ]
    return Truth(outcome(exact.oracle.loss, defined), outcome(exact.eager.loss, rounded))


def kept_share(ranks: Ranks, one: Problem, **options: Any) -> Tensor:
    """What ``linear_cross_entropy_with_metrics`` says of a call."""
    seen: list[Tensor] = []

    def noting(*args: Any, **kwargs: Any) -> Tensor:
        out: Any = linear_cross_entropy_with_metrics(*args, **kwargs)
        seen.append(out.kept_share)
        return out.loss

    step(ranks, one, call=noting, **options)
    return seen[0]
