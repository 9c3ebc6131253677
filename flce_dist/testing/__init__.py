"""For users' unit tests: simulated ranks on one machine, and a budget for numerical errors.

    import torch
    from flce_dist import linear_cross_entropy
    from flce_dist.testing import run_ranks

    def test_every_rank_returns_the_same_loss():
        hidden, weight = torch.randn(16, 32), torch.randn(100, 32)
        labels = torch.randint(100, (16,))

        def rank(tp_group):
            shard = weight.chunk(4)[tp_group.rank()]
            return linear_cross_entropy(hidden, shard, labels, tp_group=tp_group)

        losses = run_ranks(rank, 4)
        assert all(loss == losses[0] for loss in losses)

The backend "threads" runs any closure in milliseconds and names the rank whose collective differs.
"gloo" forks processes with real collectives, for end-to-end cases and for code with process-wide
state (random generators, megatron-core); ``RankPool`` keeps such processes for many calls.
"""

from flce_dist.testing.error_budget import (
    ErrorBudget,
    assert_within_budget,
    error_budget,
    relative_rms,
)
from flce_dist.testing.forked_ranks import RankFailed, RankPool
from flce_dist.testing.threaded_ranks import ThreadedGroup, run_ranks

__all__ = [
    "ErrorBudget",
    "RankFailed",
    "RankPool",
    "ThreadedGroup",
    "assert_within_budget",
    "error_budget",
    "relative_rms",
    "run_ranks",
]
