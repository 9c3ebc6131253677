"""Order of one backward on several ranks: when dhidden is summed, and hidden is overwritten."""

import threading
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flce_dist.kernels import gemm
from flce_dist.parallel.collectives import CollectiveScatter, CollectiveSum
from flce_dist.testing import run_ranks
from tests.parallel_problem import EVEN, SCHEDULES, misses, on_threads, plan_sizes, rank_step


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_sum_of_dhidden_begins_before_the_last_dweight(schedule, sequence_parallel):
    done = defaultdict[int, list[str]](list)  # by each rank's thread, in order

    def noted(function: Any, name: str | None = None) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            what = name or ("dweight" if keywords["sums_tokens"] else "dhidden")
            done[threading.get_ident()].append(what)
            return function(*args, **keywords)

        return call

    def rank(group: dist.ProcessGroup) -> list[str]:
        rank_step(group, EVEN, schedule=schedule, sequence_parallel=sequence_parallel)
        return done[threading.get_ident()]

    with mock.patch.object(gemm, "product", noted(gemm.product)):
        kind = CollectiveScatter if sequence_parallel else CollectiveSum
        with mock.patch.object(kind, "start", noted(kind.start, "sum")):
            ranks = run_ranks(rank, 2)
    for events in ranks:
        assert events.count("sum") == 1
        after = events[events.index("sum") :]
        assert "dhidden" not in after and after.count("dweight") > 0


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {"schedule": "cached"}),
        (torch.float32, {"schedule": "in_forward", "max_logits_bytes": 20_000}),
    ],
    ids=str,
)
def test_gathered_hidden_states_are_scaled_once_for_all_windows(dtype, options):
    """Of a cache in another dtype, or in two parts; the first window overwrites them."""
    problem = EVEN.changed(dtype=dtype)
    with plan_sizes(tile=8, min_window=8, max_window=32):
        found = on_threads(2, problem, sequence_parallel=True, **options)
    assert not misses(found, problem)
