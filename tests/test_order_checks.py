"""Ranks that disagree about a vocab_order all raise one message, and none waits for another."""

from typing import Any

import pytest
import torch

from flce_dist.filtered.order_checks import agreed_order
from flce_dist.filtered.vocab_order import VocabOrder, as_vocab_order
from flce_dist.testing import RankPool
from tests.module_layouts import Layout

V_ALL = 600


def order_of(seed: int) -> VocabOrder:
    tokens = torch.randperm(V_ALL, generator=torch.Generator().manual_seed(seed))
    return as_vocab_order(tokens, V_ALL)


def make_order(kind: str) -> VocabOrder | None:
    """Return what one rank has: an order by its seed, none, or an error."""
    if kind == "twice":
        return as_vocab_order(torch.zeros(V_ALL, dtype=torch.long), V_ALL)
    if kind == "short":
        return as_vocab_order(torch.arange(3), V_ALL)
    return None if kind == "none" else order_of(int(kind))


def agree_rank(group: Any, kinds: str, layout: Layout) -> tuple[type, str] | None:
    kind = kinds.split()[group.rank()]
    tp_group, mesh = layout.meshes()
    groups = [tp_group, *([] if mesh is None else mesh.get_all_groups())]
    try:
        order = agreed_order(lambda: make_order(kind), torch.empty(0), groups)
    except Exception as error:
        return type(error), str(error)
    expected = make_order(kind)
    assert (order is None) == (expected is None)
    assert order is None or expected is None or torch.equal(order[0], expected[0])
    return None


ONCE = r"vocab_order must contain each of 600 token ids once"
SHAPE = r"vocab_order must have the token of each of vocab_size = 600 rows, got \(3,\)"


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(tp=2, fsdp=2), Layout(fsdp=2, replicas=2)])
@pytest.mark.parametrize(
    ("kinds", "got"),
    [
        ("0 0 0 1", r"order \w+ on ranks 0, 1, 2 and order \w+ on rank 3"),
        ("0 none 0 0", r"order \w+ on ranks 0, 2, 3 and None on rank 1"),
        ("twice 0 0 0", rf"an invalid one \({ONCE}\) on rank 0 and order \w+ on ranks 1, 2, 3"),
        ("none none none twice", rf"None on .* 2 and an invalid one \({ONCE}\) on rank 3"),
        (
            "twice twice short short",
            rf".* \({ONCE}\) on ranks 0, 1 and .* \({SHAPE}\) on ranks 2, 3",
        ),
    ],
)
def test_each_rank_names_what_the_others_have(
    pools: dict[int, RankPool], kinds: str, got: str, layout: Layout
) -> None:
    errors = pools[4].run(agree_rank, kinds, layout)
    assert len(set(errors)) == 1
    with pytest.raises(ValueError, match=f"^vocab_order must be the same on all ranks, got {got}$"):
        raise errors[0][0](errors[0][1])


@pytest.mark.parametrize("kind", ["3", "none"])
def test_ranks_that_agree_pass(pools: dict[int, RankPool], kind: str) -> None:
    for layout in (Layout(tp=4), Layout(tp=2, fsdp=2)):
        assert pools[4].run(agree_rank, " ".join([kind] * 4), layout) == [None] * 4


def test_an_error_of_all_ranks_is_raised_as_it_is(pools: dict[int, RankPool]) -> None:
    (error,) = {*pools[4].run(agree_rank, "twice twice twice twice", Layout(tp=4))}
    assert error == (ValueError, ONCE)
    with pytest.raises(ValueError, match=ONCE):
        agreed_order(lambda: make_order("twice"), torch.empty(0), [None])
