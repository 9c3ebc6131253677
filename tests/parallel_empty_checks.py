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
WAYS: dict[str, Options] = {
    **{name: {"schedule": name} for name in ("recompute", "cached", "in_forward")},
    "filtered": {"filter_eps": 2.0**-20},  # which keeps all that there is of so few columns
}


def problems(ranks: Ranks) -> dict[str, Problem]:
    """No tokens; padding so heavy that all ranks but the first hold nothing else; none counted."""
    small = problem(ranks.device, T=24 * ranks.P, H=64, V_all=100, options=MANY)
    return {
        "no tokens": replace(small, T=0, V_all=1000),
        "no rows": replace(small, rows=100 * ranks.P),
        "no counted tokens": replace(small, ignored=1.1),
    }


def nothing_to_compute(ranks: Ranks) -> Iterator[str]:
    """Loss and gradients are those of the formula, and the same loss is everywhere."""
    for name, one in problems(ranks).items():
        truth = Truth.of(one)
        for way, options in WAYS.items():
            for sp in (False, True):
                mine = step(ranks, one, sequence_parallel=sp, **options)
                found = misses_of_share(truth, mine, one, ranks.group, sp)
                if not same_on_all_ranks(mine.loss, ranks.group):
                    found.append("loss differs between ranks")
                yield from said(f"{name}: {way}", sp, found)
