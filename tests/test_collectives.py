"""Which collectives a call issues on simulated ranks, and that a wrong one is detected."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist import linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.memory import peak_memory
from flce_dist.parallel import collectives
from flce_dist.testing import run_ranks
from tests.parallel_problem import (
    EVEN,
    SCHEDULES,
    UNEVEN,
    Outcome,
    Problem,
    misses,
    on_threads,
    rank_step,
)


def loss_with_metrics(*args: Any, **options: Any) -> Tensor:
    return linear_cross_entropy_with_metrics(*args, **options).loss


class NotedWork:
    """A collective in flight that knows whether it was waited for."""

    def __init__(self, work: dist.Work):
        self.work, self.waited = work, False

    def wait(self) -> None:
        self.waited = True
        self.work.wait()


@pytest.mark.parametrize("schedule", SCHEDULES)
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
    assert all(map(torch.equal, one[:4], alone[:4]))
    assert one_bytes == alone_bytes


class TestCollectives:
    """Which collectives, how many, how large: the same on every rank, whatever its data."""

    T, H, P = 24, 32, 4
    STATS = ("allreduce SUM float32[24]", "allreduce MAX float32[24]")

    @pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_of_a_step(self, schedule, sequence_parallel):
        """in_forward gathers nothing in backward, and sums dhidden in forward."""
        calls = on_threads(4, UNEVEN, schedule=schedule, sequence_parallel=sequence_parallel).calls
        gather: tuple[str, ...] = ()
        again: tuple[str, ...] = ()
        dhidden = "allreduce SUM float32[768]"
        if sequence_parallel:
            gather, dhidden = ("allgather float32[192]",), "reduce_scatter SUM float32[768]"
            again = gather if schedule != "in_forward" else ()
        assert calls == (*gather, *self.STATS, "allreduce SUM float32[24]", *again, dhidden)

    @pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
    def test_overflowing_rows_change_nothing(self, schedule):
        """Rescued rows, and the rank of their labels, do not change the collectives."""
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

    def test_smoothing_and_metrics_travel_in_the_same_message(self):
        problem = UNEVEN.changed(options={"label_smoothing": 0.1})
        assert on_threads(4, problem).calls[:3] == (*self.STATS, "allreduce SUM float32[48]")
        calls = on_threads(4, problem, call=loss_with_metrics).calls
        assert calls[:3] == (*self.STATS, "allreduce SUM float32[72]")

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    @pytest.mark.parametrize("schedule", ["recompute", "cached", "in_forward"])
    @pytest.mark.parametrize("frozen", ["nothing", "hidden", "weight"])
    @pytest.mark.parametrize("with_metrics", [False, True])
    def test_each_one_in_flight_is_waited_for(
        self, with_metrics, frozen, schedule, sequence_parallel, monkeypatch
    ):
        """Else its buffers may be freed while it runs, and a CUDA graph capture fails."""
        works: list[NotedWork] = []

        def note(real):
            def start(*args, async_op=False, **kwargs):
                work = real(*args, async_op=async_op, **kwargs)
                if not async_op:
                    return work
                works.append(NotedWork(work))
                return works[-1]

            return start

        monkeypatch.setattr(dist, "all_reduce", note(dist.all_reduce))
        for name in ("all_gather", "reduce_scatter"):
            monkeypatch.setattr(collectives, name, note(getattr(collectives, name)))

        call = loss_with_metrics if with_metrics else linear_cross_entropy
        options = {"schedule": schedule, "sequence_parallel": sequence_parallel}
        run_ranks(lambda group: rank_step(group, EVEN, call=call, frozen={frozen}, **options), 2)
        assert len(works) >= 2 * (2 + sequence_parallel)
        assert all(work.waited for work in works)
