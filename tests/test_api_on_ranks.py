"""linear_cross_entropy on simulated ranks; test_api_random_cases.py has random problems there."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist.testing import relative_rms, run_ranks
from tests.parallel_problem import (
    EVEN,
    SCHEDULES,
    TINY,
    UNEVEN,
    Outcome,
    joined,
    misses,
    on_threads,
    rank_step,
)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fp64(schedule, sequence_parallel):
    problem = TINY.changed(dtype=torch.float64, banned=0.3, options={"reduction": "sum"})
    outcome = on_threads(4, problem, sequence_parallel=sequence_parallel, schedule=schedule)
    assert relative_rms(outcome.dweight, problem.textbook(torch.float64).dweight) < 1e-13


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_upstream_gradients_that_differ_do_not_hang(schedule, sequence_parallel):
    """The rank is the factor, so that of the first is 0."""

    def rank(group: dist.ProcessGroup) -> Outcome:
        options: dict[str, Any] = {"schedule": schedule, "sequence_parallel": sequence_parallel}
        return rank_step(group, UNEVEN, upstream_factor=float(group.rank()), **options)

    ranks = run_ranks(rank, 2)
    expected = UNEVEN.textbook(torch.float64)
    assert not ranks[0].dweight.any()
    assert relative_rms(ranks[1].dweight, expected.dweight[254:]) < 1e-5


class TestDhidden:
    """dhidden is summed over ranks once, here or by the caller."""

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_left_to_the_caller(self, schedule):
        def rank(group):
            return rank_step(group, UNEVEN, reduce_dhidden=False, schedule=schedule)

        ranks = run_ranks(rank, 4)
        assert not any(str(24 * 32) in call for call in ranks[0].calls)
        whole = ranks[0]._replace(
            dhidden=sum(rank.dhidden for rank in ranks),
            dweight=torch.cat([rank.dweight for rank in ranks]),
            dbias=torch.cat([rank.dbias for rank in ranks]),
        )
        assert misses(whole, UNEVEN) == []
        assert misses(whole._replace(dhidden=ranks[0].dhidden), UNEVEN)  # and not already summed

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_summed_in_fp32(self, schedule, sequence_parallel):
        """A sum of bf16 shares accumulates rounding errors; a sum of fp32 shares rounds once."""
        problem = UNEVEN.changed(dtype=torch.bfloat16, T=64)
        truth = problem.textbook(torch.float64).dhidden
        errors = []
        for wide in (False, True):
            outcome = on_threads(
                8, problem, schedule=schedule, sequence_parallel=sequence_parallel,
                reduce_in_fp32=wide,
            )  # fmt: skip
            assert misses(outcome, problem) == []
            assert outcome.dhidden.dtype == torch.bfloat16
            sent = [call for call in outcome.calls if str(64 * 32) in call]
            assert sent and all(("float32" in call) == wide for call in sent)
            errors.append(relative_rms(outcome.dhidden, truth))
        assert errors[1] < 0.9 * errors[0]

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("frozen", [{"hidden"}, {"weight"}, {"hidden", "weight", "bias"}])
    def test_frozen_inputs(self, frozen, schedule, sequence_parallel):
        options = {"schedule": schedule, "sequence_parallel": sequence_parallel}
        ranks = run_ranks(lambda group: rank_step(group, EVEN, frozen=frozen, **options), 2)
        expected = rank_step(None, EVEN)
        outcome = joined(ranks, sequence_parallel=sequence_parallel)
        for name in ("hidden", "weight", "bias"):
            gradient = getattr(expected, f"d{name}")
            wanted = torch.zeros_like(gradient) if name in frozen else gradient
            torch.testing.assert_close(getattr(outcome, f"d{name}"), wanted)
