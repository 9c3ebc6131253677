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
from tests.parallel_problem import GRADIENTS, Problem, Truth, rank_step, share_of
from tests.parallel_ranks import (
    Options,
    Ranks,
    differing,
    each_way,
    misses_of_share,
    other_work,
    plan_of,
    problem,
    said,
    same_on_all_ranks,
)
from tests.problems import Inputs, Upstream


def filtered_gradients(ranks: Ranks) -> Iterator[str]:
    """Filtered: what is defined on all ranks' tensors, one kept_share, the same bits again."""
    one = problem(ranks.device) if ranks.on_gpu else problem(ranks.device, T=360, V_all=2856)
    V_all = one.V_all - 61
    one = one.changed(V_all=V_all)
    labels = one.tensors[3]
    labels[labels >= 0] %= V_all // 4  # else each tile holds a label of each block
    eps = 640 / V_all
    rounds = {"max_logits_bytes": one.T * one.dtype.itemsize * (V_all // ranks.P // 3)}
    filters: Options = {"schedule": filtered.schedule(eps)}
    truths = {sp: filtered_truth(one, ranks.P, eps, sequence_parallel=sp) for sp in (False, True)}
    for way, options in each_way(ranks, one, {"one round": filters, "rounds": filters | rounds}):
        sp = options["sequence_parallel"]
        mine = rank_step(ranks.group, one, **options)
        found = misses_of_share(mine, one, ranks.group, sp, truths[sp])
        share = kept_share(ranks, one, **options)
        if not 0.01 < share < 0.99:
            found.append(f"kept_share is {float(share)}")
        if not same_on_all_ranks(share, ranks.group):
            found.append("kept_share differs between ranks")
        yield from said(way, found)
        for repeat in range(2):
            with other_work(ranks, repeat):
                again = rank_step(ranks.group, one, **options)
            yield from differing(f"{way}, repeat {repeat}", again, mine)


def filtered_truth(one: Problem, P: int, eps: float, *, sequence_parallel: bool) -> Truth:
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
    oracle, eager = one.truth
    rounded = {
        name: gradients[name] + (getattr(eager, name) - getattr(oracle, name)) for name in GRADIENTS
    }
    defined = {name: gradients[name] for name in GRADIENTS}
    return oracle._replace(**defined), eager._replace(**rounded)


def kept_share(ranks: Ranks, one: Problem, **options: Any) -> Tensor:
    """What ``linear_cross_entropy_with_metrics`` says of a call."""
    share = share_of(ranks.group, one, sequence_parallel=options["sequence_parallel"])
    share.leaves()
    out = share.loss(ranks.group, one, call=linear_cross_entropy_with_metrics, **options)
    return out.kept_share
