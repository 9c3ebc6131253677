"""max_counted and skip_ignored on several ranks; test_counted.py has one rank."""

from typing import Any

import pytest
import torch

from flce_dist.testing import RankPool
from tests.counted_problem import ONE_RANK, n_of
from tests.parallel_problem import Problem, joined, misses, on_threads, plan_sizes, rank_step
from tests.sequence_problem import B, S, step_rank, whole

LONG = Problem(T=48, ignored=0.7)
NONE = LONG.changed(ignored=1.1)
PER_TOKEN = LONG.changed(options={"reduction": "none", "label_smoothing": 0.1})
BATCHED = Problem(T=B * S, ignored=0.6, options={"reduction": "none"})


@pytest.mark.parametrize("sp", [False, True], ids=["replicated", "sequence parallel"])
@pytest.mark.parametrize(("schedule", "problem", "more", "options"), [
    ("recompute", LONG, 0, {"reduce_in_fp32": True}),
    ("cached", ONE_RANK, 3, {}),
    ("cached", PER_TOKEN, 0, {}),
    ("in_forward", LONG, 1000, {}),
    ("in_forward", ONE_RANK, 1, {"max_logits_bytes": 9000}),
    ("cached", LONG.changed(dtype=torch.bfloat16), 0, {}),
    ("auto", NONE, 1, {}),
    ("cached", LONG, None, {"skip_ignored": True}),
    ("in_forward", ONE_RANK, None, {"skip_ignored": True}),
    ("recompute", NONE, None, {"skip_ignored": True}),
])  # fmt: skip
def test_on_ranks(schedule, problem, more, options, sp):
    """Whose shards of the vocabulary are uneven."""
    most = None if more is None else n_of(problem) + more
    options = {**options, "max_counted": most, "sequence_parallel": sp}
    with plan_sizes(tile=8, min_window=8):
        outcome = on_threads(4, problem, schedule=schedule, **options)
    assert misses(outcome, problem) == []


@pytest.mark.parametrize("sp", [False, True])
def test_kernels_on_ranks(ranks: RankPool, sp: bool) -> None:
    """The loss has the same bits on one rank, and of all tokens."""
    problem = LONG.changed(V_all=512)
    options: dict[str, Any] = {"impl": "triton", "tp_invariant": True}
    found = ranks.run(rank_step, problem, max_counted=20, sequence_parallel=sp, **options)
    two = joined(found, sequence_parallel=sp)
    assert misses(two, problem) == []
    for most in (None, 20):
        assert torch.equal(rank_step(None, problem, max_counted=most, **options).loss, two.loss)


@pytest.mark.parametrize("sp", [False, True])
def test_collectives_do_not_depend_on_the_mask(sp):
    """dhidden is summed of the 20 tokens alone, unless a rank gets its own tokens of it."""
    calls, *others = (
        on_threads(2, problem, schedule="recompute", max_counted=20, sequence_parallel=sp).calls
        for problem in (LONG, NONE, LONG.changed(seed=5))
    )
    assert all(other == calls for other in others)
    assert "allreduce MAX float32[20]" in calls
    assert ("allreduce SUM float32[640]" in calls) is not sp
    moved = [call for call in calls if "gather" in call or "scatter" in call]
    assert moved == (["allgather float32[768]"] * 2 + ["reduce_scatter SUM float32[1536]"]) * sp


@pytest.mark.parametrize("kind", ["", "compiled", "dtensors"])
def test_along_the_second_dimension(ranks: RankPool, kind: str) -> None:
    outcomes = ranks.run(step_rank, BATCHED, kind, max_counted=n_of(BATCHED) + 2)
    assert misses(whole(outcomes), BATCHED) == []
