"""Mistakes to plant in what the checks of gpu_parallel.py call, each for one rank's process.

    torchrun --standalone --nproc-per-node 2 -m tests.parallel_mistakes MISTAKE --device cpu

runs gpu_parallel.py with one of them.
"""

import itertools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist import api
from flce_dist.parallel import collectives, peer_copies

Plant = Callable[[pytest.MonkeyPatch], None]


def replace_op(patch: pytest.MonkeyPatch, wrong: Callable[..., Any]) -> None:
    """Let every check call ``wrong(op, hidden, weight, labels, **options)`` for the op."""
    op = api.linear_cross_entropy
    patch.setattr(api, "linear_cross_entropy", lambda *a, **kw: wrong(op, *a, **kw))


def never_the_same(patch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    replace_op(patch, lambda op, *a, **kw: op(*a, **kw) * (1 + 1e-3 * next(calls)))


def another_loss_on_rank_1(patch: pytest.MonkeyPatch) -> None:
    replace_op(patch, lambda op, *a, **kw: op(*a, **kw) * (1 + 3e-7 * dist.get_rank()))


def dhidden_not_summed(patch: pytest.MonkeyPatch) -> None:
    def own_part(self: Any) -> torch.Tensor:
        group = dist.group.WORLD
        assert group is not None
        return self.tokens.tensor_split(group.size())[group.rank()].clone()

    for kind in (collectives.CollectiveScatter, peer_copies.PeerScatter):
        patch.setattr(kind, "start", lambda self, first, last: None)
        patch.setattr(kind, "wait", own_part)


def rank_1_raises(patch: pytest.MonkeyPatch) -> None:
    """What rank 0 waits for then never comes, so it need not wait long."""

    def wrong(op: Any, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise ArithmeticError("only here")
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
        return op(*args, **options)

    replace_op(patch, wrong)


if __name__ == "__main__":
    from tests import gpu_parallel

    globals()[sys.argv.pop(1)](pytest.MonkeyPatch())
    sys.exit(gpu_parallel.main())
