"""linear_cross_entropy on simulated ranks: what it computes, and which collectives it issues.

test_api_random_cases.py has random problems there.
"""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.launch.peak_memory import peak_memory
from flce_dist.parallel import collectives
from flce_dist.testing import relative_rms, run_ranks
from tests import problems
from tests.outcomes import Outcome
from tests.parallel_problem import (
    EVEN,
    SCHEDULES,
    UNEVEN,
    Problem,
    joined,
    misses,
    on_threads,
    rank_step,
)
from tests.problems import pairwise

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
each_split = pytest.mark.parametrize("sequence_parallel", [False, True])


@each_split
@each_schedule
def test_upstream_gradients_that_differ_do_not_hang(schedule, sequence_parallel):
    """The rank is the factor, so that of the first is 0."""

    def rank(group: dist.ProcessGroup) -> Outcome:
        options: dict[str, Any] = {"schedule": schedule, "sequence_parallel": sequence_parallel}
        return rank_step(group, UNEVEN, upstream_factor=float(group.rank()), **options)

    ranks = run_ranks(rank, 2)
    expected = UNEVEN.textbook(torch.float64)
    assert not ranks[0].dweight.any()
    assert relative_rms(ranks[1].dweight, expected.dweight[254:]) < 1e-5


@pytest.mark.parametrize(
    ("frozen", "schedule", "sequence_parallel"),
    pairwise(itertools.product(["hidden", "weight", "hidden weight bias"], SCHEDULES, [0, 1])),
)
def test_frozen_inputs(frozen, schedule, sequence_parallel):
    options: dict[str, Any] = {"schedule": schedule, "sequence_parallel": bool(sequence_parallel)}
    options["frozen"] = frozen.split()
    ranks = run_ranks(lambda group: rank_step(group, EVEN, **options), 2)
    expected = rank_step(None, EVEN)
    outcome = joined(ranks, sequence_parallel=options["sequence_parallel"])
    for name in ("hidden", "weight", "bias"):
        gradient = getattr(expected, f"d{name}")
        wanted = torch.zeros_like(gradient) if name in frozen else gradient
        torch.testing.assert_close(getattr(outcome, f"d{name}"), wanted)


@each_schedule
def test_dhidden_left_to_the_caller(schedule):
    def rank(group):
        return rank_step(group, UNEVEN, reduce_dhidden=False, schedule=schedule)

    ranks = run_ranks(rank, 4)
    assert not any(str(24 * 32) in call for call in ranks[0].calls)
    whole = ranks[0].changed(
        dhidden=sum(rank.dhidden for rank in ranks),
        dweight=torch.cat([rank.dweight for rank in ranks]),
        dbias=torch.cat([rank.dbias for rank in ranks]),
    )
    assert misses(whole, UNEVEN) == []
    assert misses(whole.changed(dhidden=ranks[0].dhidden), UNEVEN)  # and not already summed


@each_split
@each_schedule
def test_dhidden_summed_in_fp32(schedule, sequence_parallel):
    """A sum of bf16 shares accumulates rounding errors; a sum of fp32 shares rounds once."""
    problem = UNEVEN.changed(dtype=torch.bfloat16, T=64)
    truth = problem.textbook(torch.float64).dhidden
    errors = []
    for wide in (False, True):
        options = {"schedule": schedule, "sequence_parallel": sequence_parallel}
        outcome = on_threads(8, problem, reduce_in_fp32=wide, **options)
        assert misses(outcome, problem) == []
        assert outcome.dhidden.dtype == torch.bfloat16
        sent = [call for call in outcome.calls if str(64 * 32) in call]
        assert sent and all(("float32" in call) == wide for call in sent)
        errors.append(relative_rms(outcome.dhidden, truth))
    assert errors[1] < 0.9 * errors[0]


STATS = ("allreduce SUM float32[24]", "allreduce MAX float32[24]")


def loss_with_metrics(*args: Any, **options: Any) -> Tensor:
    return linear_cross_entropy_with_metrics(*args, **options).loss


@each_schedule
@pytest.mark.parametrize("option", ["sequence_parallel", "reduce_in_fp32", "tp_group alone"])
def test_a_group_of_one_rank_is_no_group(schedule, option):
    """No collective is issued; bits and peak memory are those of a call without a group."""
    problem = UNEVEN.changed(dtype=torch.bfloat16)

    def measured(group: dist.ProcessGroup | None) -> tuple[Outcome, int]:
        options: dict[str, Any] = {option: True} if group and "alone" not in option else {}
        with peak_memory("cpu") as peak:
            outcome = rank_step(group, problem, schedule=schedule, **options)
        return outcome, peak.bytes

    measured(None)  # what only a first call does
    ((one, one_bytes),), (alone, alone_bytes) = run_ranks(measured, 1), measured(None)
    assert one.calls == ()
    assert all(map(torch.equal, one.tensors(), alone.tensors()))
    assert one_bytes == alone_bytes


@problems.each_schedule
@each_split
def test_collectives_of_a_step(schedule, sequence_parallel):
    """The same ones, as large, on every rank, whatever its data.

    in_forward gathers nothing in backward, and sums dhidden in forward.
    """
    calls = on_threads(4, UNEVEN, schedule=schedule, sequence_parallel=sequence_parallel).calls
    gather: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    dhidden = "allreduce SUM float32[768]"
    if sequence_parallel:
        gather, dhidden = ("allgather float32[192]",), "reduce_scatter SUM float32[768]"
        again = gather if schedule != "in_forward" else ()
    assert calls == (*gather, *STATS, "allreduce SUM float32[24]", *again, dhidden)


def test_label_logits_of_all_chunks_travel_together():
    """Where hidden is replicated, and no section is still to come."""
    problem = UNEVEN.changed(T=640)
    options: dict[str, Any] = {"schedule": "in_forward", "max_logits_bytes": 1}
    outcome = on_threads(4, problem, **options)
    dhidden = f"allreduce SUM float32[{640 * 32}]"
    reduced = [call for call in outcome.calls if call.startswith("allreduce") and call != dhidden]
    per_chunk = [
        call
        for n in (256, 256, 128)
        for call in (f"allreduce MAX float32[{n}]", f"allreduce SUM float32[{n}]")
    ]
    assert reduced == ["allreduce SUM float32[640]", *per_chunk]
    assert misses(outcome, problem) == []


@problems.each_schedule
def test_rescued_rows_change_no_collectives(schedule):
    """Nor does the rank of their labels."""
    problem = Problem(H=64, seed=2)
    usual = on_threads(4, problem, schedule=schedule).calls
    hidden, weight, _, labels = problem.tensors
    labels[0] = 400  # of the last rank alone
    weight[400] = 3.0 * weight[400]
    hidden[0] = -150.0 * weight[400] / weight[400].square().sum()
    outcome = on_threads(4, problem, schedule=schedule)
    assert outcome.calls == usual
    assert problem.textbook(torch.float64).loss > 3
    assert misses(outcome, problem) == []


def test_smoothing_and_metrics_travel_in_the_same_message():
    problem = UNEVEN.changed(options={"label_smoothing": 0.1})
    assert on_threads(4, problem).calls[:3] == (*STATS, "allreduce SUM float32[48]")
    calls = on_threads(4, problem, call=loss_with_metrics).calls
    assert calls[:3] == (*STATS, "allreduce SUM float32[72]")


@problems.each_schedule
@each_split
@pytest.mark.parametrize("frozen", ["nothing", "hidden", "weight"])
def test_each_collective_in_flight_is_waited_for(frozen, sequence_parallel, schedule, monkeypatch):
    """Else its buffers may be freed while it runs, and a CUDA graph capture fails."""
    works: list[Any] = []

    def note(real):
        def start(*args, async_op=False, **kwargs):
            work = real(*args, async_op=async_op, **kwargs)
            if not async_op:
                return work
            works.append(mock.Mock(wraps=work))
            return works[-1]

        return start

    monkeypatch.setattr(dist, "all_reduce", note(dist.all_reduce))
    for name in ("all_gather", "reduce_scatter"):
        monkeypatch.setattr(collectives, name, note(getattr(collectives, name)))
    options: dict[str, Any] = {"schedule": schedule, "sequence_parallel": sequence_parallel}
    options["frozen"] = {frozen}
    for call in (linear_cross_entropy, loss_with_metrics):
        works.clear()
        options["call"] = call
        run_ranks(lambda group: rank_step(group, EVEN, **options), 2)
        assert len(works) >= 2 * (sequence_parallel + (frozen != "hidden"))
        assert all(work.wait.called for work in works)
