"""Values that ranks must share, and rows of the weight that they must not: check_ranks reads them.

T = 12 tokens, H = 8, V_all = 20 rows of vocabulary.
"""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flce_dist.parallel.vocab import vocab_range
from flce_dist.testing import run_ranks
from tests.test_rank_check import BEGINS, V_ALL, H, T, say, verdicts


@pytest.mark.parametrize(
    ("name", "other"),
    [("labels", torch.arange(T).flip(0)), ("token_weight", torch.linspace(0, 1, T))],
)
def test_values_that_all_must_share_are_compared(name: str, other: torch.Tensor) -> None:
    value = "'[0-9a-f]{16}'"
    expected = f"{BEGINS}hash of {name} is {value} on ranks 0, 2 and {value} on rank 1"
    assert re.fullmatch(expected, say({name: other}) or "")


WHOLE = torch.randn(V_ALL, H, generator=torch.Generator().manual_seed(0))


def says_of_weight(weight: torch.Tensor, **changes: Any) -> set[str | None]:
    """The error if all of 3 ranks pass this weight of V_ALL rows."""
    same = dict(weight=weight, bias=None, vocab_size=None, vocab_range=None)
    return set(run_ranks(lambda group: verdicts(group, group.rank(), same | changes), 3))


@pytest.mark.parametrize("vocab_size", [None, V_ALL])
def test_a_whole_weight_on_every_rank_is_noticed(vocab_size: int | None) -> None:
    (said,) = says_of_weight(WHOLE.clone().requires_grad_(), vocab_size=vocab_size)
    assert said == (
        "weight must be each rank's own rows of the vocabulary, got the same 20 rows on all 3 "
        "ranks, and no label above 11: pass each rank its part of the whole weight, or "
        "tp_group=None; initialise different shards from different seeds"
    )


def test_equal_weights_that_may_be_shards_pass() -> None:
    """Constants; labels of other ranks' rows, or none; rows that differ anywhere in a sample."""
    assert says_of_weight(torch.zeros(V_ALL, H)) == says_of_weight(torch.ones(V_ALL, H)) == {None}
    assert says_of_weight(WHOLE, labels=torch.arange(T) + V_ALL) == {None}
    assert says_of_weight(WHOLE, labels=torch.full((T,), -100)) == {None}

    def shards(group: dist.ProcessGroup) -> str | None:
        start, end = vocab_range(V_ALL, group.rank(), group.size())
        return verdicts(group, group.rank(), dict(weight=WHOLE[start:end]))

    assert run_ranks(shards, 4) == [None] * 4
    assert run_ranks(shards, 1) == [None]
