"""Calls of ranks of which one differs, and what each is told.

T = 12 tokens, H = 8, V_ALL = 20 rows of vocabulary, P ranks.
"""

from typing import Any

import torch
import torch.distributed as dist

from flce_dist import linear_cross_entropy
from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import run_ranks
from tests.parallel_problem import complaint

T, H, V_ALL = 12, 8, 20
BEGINS = "ranks must call alike: "
ROWS = 7  # of rank 1 of 3
F64 = torch.float64


def call(rank: int, P: int) -> dict[str, Any]:
    """The arguments of a rank of P that all call alike."""
    start, end = vocab_range(V_ALL, rank, P)
    return dict(
        hidden=torch.zeros(T, H, requires_grad=True),
        weight=torch.zeros(end - start, H, requires_grad=True),
        labels=torch.arange(T),
        bias=torch.zeros(end - start),
        token_weight=torch.ones(T),
        temperature=0.7,
        vocab_size=V_ALL,
        vocab_range=(start, end),
    )


def complaint_of_rank(group: dist.ProcessGroup, odd: int, changes: dict[str, Any]) -> str:
    """What this rank is told where rank ``odd`` calls with ``changes``; nothing if all is well."""
    mine = call(group.rank(), group.size()) | (changes if group.rank() == odd else {})
    return complaint(linear_cross_entropy, **mine, tp_group=group)


def complaint_of_all(changes: dict[str, Any]) -> str:
    """What each of three ranks is told, which must be the same; rank 1 calls with ``changes``."""
    (said,) = set(run_ranks(lambda group: complaint_of_rank(group, 1, changes), 3))
    return said


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)
