"""Divergences, best ids and samples in sections, whose hidden states travel one by one.

test_sections.py has the cut itself, and the loss.
"""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist.core.sections import rows_of_sections
from flce_dist.divergence import choose
from flce_dist.divergence.pair import ranges
from flce_dist.kernels.best import chunks
from flce_dist.kernels.divergence.formulas import METRIC_ROWS, Measure
from flce_dist.kernels.grid import PLANNED
from flce_dist.testing import run_ranks
from tests import best_problem, divergence_problem
from tests.problems import both, pairwise
from tests.test_sample import draw

pytestmark = pytest.mark.usefixtures("one_launch_at_a_time")

GROUP_T = 128
"""Tokens of a divergence's section, if no budget allows more."""


def gathered(calls: Sequence[str], dtype: str) -> list[int]:
    """Elements of this rank in each gather of such numbers."""
    found = (re.fullmatch(rf"allgather {dtype}\[(\d+)\]", call) for call in calls)
    return [int(match[1]) for match in found if match]


def check_gathers(
    calls: Sequence[str], T: int, P: int, most: int, passes: Sequence[str],
    kind: str = "reverse_kl", *, with_metrics: bool = True,
) -> None:  # fmt: skip
    """Check all gathers: hidden states of each section travel alone, one model's, then the other's.

    Of ``passes`` "values" have a section's first hidden states travel before the values of the one
    before, "gradients" after these, and "again" are gradients that need no values.
    """
    rows = [end - start for start, end in rows_of_sections(T, P, (most,))]
    assert len(rows) > 1
    first, second = divergence_problem.H, divergence_problem.H_T
    measure = Measure(kind, 0.5)
    if measure.is_teacher_first:
        first, second = second, first
    sums = measure.sums + METRIC_ROWS * with_metrics
    of_token = [5, sums] if with_metrics or not measure.takes_one_pass else [5]
    expected = []
    for what in passes:
        for i, n in enumerate(rows):
            chunks = [] if what == "again" else ranges(0, n * P, most)
            values = [k * (end - start) for start, end in chunks for k in of_token]
            following = rows[i + 1 : i + 2] if what == "values" else []
            has_travelled = what == "values" and i > 0
            expected += [] if has_travelled else [n * first]
            expected += [n * second, *(m * first for m in following), *values]
    assert gathered(calls, "float64") == expected


@pytest.mark.parametrize(
    ("kind", "P", "way"),
    pairwise((k, P, way) for k in divergence_problem.KINDS for P in (2, 3, 4) for way in range(4)),
)
def test_divergences(kind: str, P: int, way: int) -> None:
    ways: list[dict[str, Any]] = [
        {"reduction": "mean"},
        {"reduction": "sum", "token_weight": torch.linspace(0.1, 2.0, 384)},
        {"reduction": "none", "schedule": "recompute"},
        {"reduction": "none", "temperature": torch.linspace(0.5, 2.0, 384)},
    ]
    given = divergence_problem.problem(
        torch.float64, kind=kind, tokens=(384,), max_logits_bytes=1, **ways[way]
    )
    found = divergence_problem.on_ranks(given, P, sequence_parallel=True, with_metrics=True)
    divergence_problem.compare(found, given, with_metrics=True)
    passes = ["values", "again"] if ways[way]["reduction"] == "none" else ["gradients"]
    check_gathers(found.calls, 384, P, GROUP_T, passes, kind)


@pytest.mark.parametrize(
    "way", [{"reduction": "mean"}, {"reduction": "none", "schedule": "recompute"}]
)
def test_a_divergence_whose_section_is_more_than_a_group(
    way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five ranks a row each, where a group holds four tokens."""
    monkeypatch.setattr(choose, "PLANNED", PLANNED._replace(tile_t=4))
    choose.sizes.cache_clear()
    given = divergence_problem.problem(torch.float64, tokens=(15,), max_logits_bytes=1, **way)
    found = divergence_problem.on_ranks(given, 5, sequence_parallel=True, with_metrics=True)
    choose.sizes.cache_clear()
    divergence_problem.compare(found, given, with_metrics=True)
    passes = ["values", "again"] if way["reduction"] == "none" else ["gradients"]
    check_gathers(found.calls, 15, 5, 4, passes)


def test_a_divergence_without_gradients() -> None:
    given = divergence_problem.problem(torch.float64, tokens=(384,), max_logits_bytes=1)
    with torch.no_grad():
        expected = divergence_problem.linear_divergence(**given.operands, **given.options)

    def value(group: Any) -> tuple[Tensor, Sequence[str]]:
        mine = {name: x.tensor_split(2)[group.rank()] for name, x in given.operands.items()}
        with torch.no_grad():
            loss = divergence_problem.linear_divergence(
                **mine, **given.options, tp_group=group, sequence_parallel=True
            )
        return loss, group.calls

    for found, calls in run_ranks(value, 2):
        torch.testing.assert_close(found, expected)
        check_gathers(calls, 384, 2, GROUP_T, ["values"], with_metrics=False)


@both
@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize("k", [None, 1, 5])
def test_best_ids(impl: str, P: int, k: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = best_problem.problem(k=k)
    monkeypatch.setattr(chunks, "PART_BYTES", 4 * 5 * 5)
    calls: list[str] = []
    found = best_problem.on_ranks(asked, P, impl, sequence_parallel=True, calls=calls)
    best_problem.compare(found, asked)
    hidden = gathered(calls, "float32")
    assert len(hidden) > 1 and sum(hidden) == asked.hidden.numel() // P


@both
def test_samples(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = best_problem.replace(best_problem.real_problem(k=None), options={})
    whole = draw(asked, impl)
    monkeypatch.setattr(chunks, "PART_BYTES", 4 * 5 * 5)
    calls: list[str] = []
    found = best_problem.on_ranks(asked, 2, impl, sequence_parallel=True, call=draw, calls=calls)
    assert torch.equal(found.ids, whole.ids)
    best_problem.close(found.logprob, whole.logprob)
    hidden = gathered(calls, "float32")
    assert len(hidden) > 1 and sum(hidden) == asked.hidden.numel() // 2
