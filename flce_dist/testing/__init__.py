"""For users' unit tests: simulated ranks on one machine, and a budget for numerical errors.

    losses = run_ranks(lambda tp_group: my_loss(shards[tp_group.rank()], tp_group), 4)

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
