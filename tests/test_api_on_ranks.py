"""linear_cross_entropy on P simulated ranks gives the results of one process.

tests/test_api_random_cases.py has random problems on threads, tests/gpu_parallel.py those over
gloo.
"""

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
    Problem,
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
@pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
def test_triton_kernels_on_two_ranks(pools, schedule, sequence_parallel):
    """Over gloo: interpreted kernels cannot run in two threads at once."""
    problem = Problem(T=12, H=64, V_all=201, seed=3, options={"reduction": "sum"}, banned=0.3)
    assert problem.tensors[2][problem.tensors[3]].isinf().any()
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "schedule": schedule}
    ranks = pools[2].run(rank_step, problem, impl="triton", **options)
    assert misses(joined(ranks, sequence_parallel=sequence_parallel), problem) == []


class TestGroups:
    """The ranks of the tensor-parallel group need not be all ranks, nor neighbours."""

    @staticmethod
    def replica_step(world: dist.ProcessGroup, tp_ranks: list[list[int]], sp: bool) -> Outcome:
        groups = [dist.new_group(ranks) for ranks in tp_ranks]
        replica = next(i for i, ranks in enumerate(tp_ranks) if world.rank() in ranks)
        problem = UNEVEN.changed(seed=replica)
        return rank_step(groups[replica], problem, sequence_parallel=sp)

    @pytest.mark.parametrize("sp", [False, True])
    @pytest.mark.parametrize(
        "tp_ranks", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3, 2], [1]]],
        ids=["neighbours", "strided", "unequal"],
    )  # fmt: skip
    def test_replicas(self, tp_ranks, sp):
        outcomes = run_ranks(lambda world: self.replica_step(world, tp_ranks, sp), 4)
        for replica, ranks in enumerate(tp_ranks):
            members = [outcomes[rank] for rank in sorted(ranks)]
            outcome = joined(members, sequence_parallel=sp)
            assert misses(outcome, UNEVEN.changed(seed=replica)) == []

    def test_no_group_beside_a_default_group_sends_nothing(self):
        def rank(group):
            return rank_step(None, UNEVEN), group.calls

        for outcome, calls in run_ranks(rank, 2):
            assert calls == []
            assert misses(outcome, UNEVEN) == []


def test_a_label_beyond_the_vocabulary_is_named_on_every_rank():
    problem = Problem(ignored=0.0)
    problem.tensors[3][5] = 507

    def rank(group):
        with pytest.raises(ValueError, match=r"labels must be within \[0, 507\).* got 507"):
            rank_step(group, problem)
        return group.calls

    assert run_ranks(rank, 2) == [[], []]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_upstream_gradients_that_differ_do_not_hang(pools, schedule, sequence_parallel):
    """The rank is the factor, so that of the first is 0."""
    options = {"schedule": schedule, "sequence_parallel": sequence_parallel}
    ranks = pools[2].run(scaled_step, UNEVEN, **options)
    expected = UNEVEN.textbook(torch.float64)
    assert not ranks[0].dweight.any()
    assert relative_rms(ranks[1].dweight, expected.dweight[254:]) < 1e-5


def scaled_step(group: dist.ProcessGroup, problem: Problem, **options: Any) -> Outcome:
    return rank_step(group, problem, upstream_factor=float(group.rank()), **options)


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
