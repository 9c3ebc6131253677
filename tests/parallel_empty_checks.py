"""Check of calls without tokens, and of ranks without rows; the same kind as parallel_checks.py.

What a rank does not compute, others may still wait for.
"""

from collections.abc import Iterator
from dataclasses import replace

from tests.parallel_checks import (
    Options,
    Ranks,
    Truth,
    misses_of_share,
    problem,
    said,
    same_on_all_ranks,
    step,
)
from tests.parallel_problem import Problem

MANY: Options = {"label_smoothing": 0.1, "z_loss_weight": 1e-3}


def problems(ranks: Ranks) -> dict[str, Problem]:
    """No tokens; padding so heavy that all ranks but the first have nothing else, of each kind."""
    small = problem(ranks.device, T=24 * ranks.P, H=64, V_all=100, options=MANY)
    one_rank_has_rows = replace(small, rows=100 * ranks.P)
    return {
        "no tokens": replace(small, T=0, V_all=1000),
        "no tokens, none": replace(small, T=0, V_all=1000, options={**MANY, "reduction": "none"}),
        "no rows": one_rank_has_rows,
        "no rows, sum": replace(one_rank_has_rows, options={**MANY, "reduction": "sum"}),
        "no counted tokens": replace(small, ignored=1.1),
    }


def ways(one: Problem) -> dict[str, Options]:
    """Every schedule, and the filter, which keeps all that there is of so few columns."""
    found: dict[str, Options] = {
        name: {"schedule": name} for name in ("recompute", "cached", "auto", "in_forward")
    }
    if one.options.get("reduction") == "none":
        del found["in_forward"]
    return {**found, "filtered": {"filter_eps": 2.0**-20}}


def nothing_to_compute(ranks: Ranks) -> Iterator[str]:
    """Loss and gradients are those of the formula, and the same loss is everywhere."""
    for name, one in problems(ranks).items():
        truth = Truth.of(one)
        for way, options in ways(one).items():
            for sp in (False, True):
                mine = step(ranks, one, sequence_parallel=sp, **options)
                found = misses_of_share(truth, mine, one, ranks.group, sp)
                if not same_on_all_ranks(mine.loss, ranks.group):
                    found.append("loss differs between ranks")
                yield from said(f"{name}: {way}", sp, found)
