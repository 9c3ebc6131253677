"""Ranks that disagree about a vocab_order all raise one message, and none waits for another."""

import re
from typing import Any

import pytest
import torch

from flce_dist.filtered.order_checks import agreed_order
from flce_dist.filtered.vocab_order import VocabOrder, as_vocab_order
from flce_dist.testing import RankPool
from tests.module_layouts import VOCAB, Layout, order_of


def make_order(kind: str) -> VocabOrder | None:
    """Return what one rank has: an order by its seed, none, or an error."""
    if kind == "twice":
        return as_vocab_order(torch.zeros(VOCAB, dtype=torch.long), VOCAB)
    if kind == "short":
        return as_vocab_order(torch.arange(3), VOCAB)
    return None if kind == "none" else order_of(int(kind))


def agree_rank(group: Any, kinds: str, layout: Layout) -> str:
    """What is raised; nothing if this rank's own order is returned."""
    tp_group, mesh = layout.meshes()
    groups = [tp_group, *([] if mesh is None else mesh.get_all_groups())]
    mine: list[VocabOrder | None] = []

    def make() -> VocabOrder | None:
        mine.append(make_order(kinds.split()[group.rank()]))
        return mine[0]

    try:
        assert agreed_order(make, torch.empty(0), groups) is mine[0]
    except ValueError as error:
        return str(error)
    return ""


DIFFER = "vocab_order must be the same on all ranks, got "
ONCE = "vocab_order must contain each of 507 token ids once"
SHAPE = r"vocab_order must have the token of each of vocab_size = 507 rows, got \(3,\)"


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(tp=2, fsdp=2), Layout(fsdp=2, replicas=2)])
@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ("3 3 3 3", ""),
        ("none none none none", ""),
        ("0 0 0 1", rf"{DIFFER}order \w+ on ranks 0, 1, 2 and order \w+ on rank 3"),
        ("0 none 0 0", rf"{DIFFER}order \w+ on ranks 0, 2, 3 and None on rank 1"),
        ("twice 0 0 0",
         rf"{DIFFER}an invalid one \({ONCE}\) on rank 0 and order \w+ on ranks 1, 2, 3"),
        ("none none none twice", rf"{DIFFER}None on .* 2 and an invalid one \({ONCE}\) on rank 3"),
        ("twice twice short short",
         rf"{DIFFER}.* \({ONCE}\) on ranks 0, 1 and .* \({SHAPE}\) on ranks 2, 3"),
        ("twice twice twice twice", ONCE),  # an error of all ranks is raised as it is
    ],
)  # fmt: skip
def test_all_ranks_say_the_same(
    pools: dict[int, RankPool], kinds: str, said: str, layout: Layout
) -> None:
    (found,) = {*pools[4].run(agree_rank, kinds, layout)}
    assert re.fullmatch(said, found), found
