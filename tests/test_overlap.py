"""The sum of dhidden over ranks begins before the last GEMM of dweight, which it overlaps."""

import threading
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from flce_dist.kernels import gemm
from flce_dist.parallel.collectives import CollectiveScatter, CollectiveSum
from flce_dist.testing import run_ranks
from tests.parallel_problem import EVEN, SCHEDULES, rank_step


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
