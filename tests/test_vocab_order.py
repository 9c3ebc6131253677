"""Orders of the vocabulary: permutations in which every rank keeps as many tiles as the others."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.filtered import VocabOrder, frequency_order
from flce_dist.filtered.order_checks import agreed_order
from flce_dist.filtered.vocab_order import TILE_V, as_vocab_order, rows_of
from tests.module_layouts import VOCAB, Layout, order_of
from tests.on_ranks import on_ranks


def zipf(vocab_size: int, seed: int = 0) -> Tensor:
    counts = 1e9 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    return counts[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))].long()


@pytest.mark.parametrize("vocab_size", [1, 5, 255, 256, 507, 50257, 131072])
@pytest.mark.parametrize("padding", [0, 1, 300])
def test_an_order_is_a_permutation_and_its_inverse(vocab_size, padding):
    order = frequency_order(zipf(vocab_size), padded_vocab_size=vocab_size + padding)
    ids = torch.arange(vocab_size)
    assert torch.equal(order.token_of_row.sort().values, ids)
    assert torch.equal(order.row_of_token[order.token_of_row], ids)
    assert order.token_of_row.dtype == order.row_of_token.dtype == torch.int64


def test_equal_counts_go_by_token_id_and_bits_do_not_vary():
    counts = torch.zeros(1000, dtype=torch.long)
    counts[700] = 1
    order = frequency_order(counts)
    first = int(order.row_of_token[700])
    assert first % TILE_V == 0 and order.token_of_row[first:][:4].tolist() == [700, 0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(order, frequency_order(counts), strict=True))
    assert torch.equal(frequency_order(counts.float()).token_of_row, order.token_of_row)


@pytest.mark.parametrize(
    "vocab_size, rows", [(131072, 131072), (128256, 129024), (128256, 128256), (50257, 50304)]
)
@pytest.mark.parametrize("P", [1, 2, 4, 8, 16, 32, 64])
def test_every_rank_gets_the_same_tiles_or_one_more(P, vocab_size, rows):
    """However many of the most frequent tiles are kept, until the first shard is full."""
    counts = vocab_size - torch.arange(vocab_size)
    tokens = frequency_order(counts, padded_vocab_size=rows).token_of_row
    level = tokens[: vocab_size // TILE_V * TILE_V : TILE_V] // TILE_V  # of each tile
    middle = TILE_V * torch.arange(len(level)) + TILE_V // 2
    in_turns = 64 * int((middle * 64 // rows).bincount().min())
    ranks = (middle * P // rows)[level.argsort()][:in_turns]
    dealt = torch.nn.functional.one_hot(ranks, P).cumsum(0)
    assert in_turns > 0 and (dealt.max(1).values - dealt.min(1).values).max() <= 1


def test_rows_of_labels():
    order = as_vocab_order(torch.tensor([2, 0, 3, 1]), 4)
    labels = torch.tensor([[0, 1, 2], [3, -100, 4]])
    for dtype in (torch.int64, torch.int32):
        rows = rows_of(labels.to(dtype), order.row_of_token)
        assert rows.dtype == dtype
        assert rows.tolist() == [[1, 3, 0], [2, -100, 4]]
    assert rows_of(labels.float(), order.row_of_token).dtype == torch.float32
    assert rows_of(torch.tensor(3), order.row_of_token) == 2


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 1, 2], "be a VocabOrder or an int64 tensor, got list"),
        (torch.arange(3.0), "be a VocabOrder or an int64 tensor, got torch.float32"),
        (torch.arange(4), r"each of vocab_size = 3 rows, got \(4,\)"),
        (torch.tensor([0, 1, 1]), "each of 3 token ids once"),
        (torch.tensor([0, 1, -1]), "each of 3 token ids once"),
    ],
)
def test_what_is_no_permutation_is_refused(order, message):
    with pytest.raises(ValueError, match=f"^vocab_order must .*{message}$"):
        as_vocab_order(order, 3)


@pytest.mark.parametrize(
    ("counts", "padded", "message"),
    [
        (torch.zeros(2, 3), None, r"counts must be \[V_all\], got \(2, 3\)"),
        ([1, 2, 3], None, r"counts must be a tensor \[V_all\], got list"),
        (torch.tensor([4, -0.5, 0]), None, "counts must be at least 0, got -0.5"),
        (torch.zeros(5), 4, "padded_vocab_size must be at least V_all = 5, got 4"),
    ],
)
def test_wrong_counts_are_refused(counts, padded, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        frequency_order(counts, padded_vocab_size=padded)


# --- whether all ranks have one


def make_order(kind: str) -> VocabOrder | None:
    if kind == "twice":
        return as_vocab_order(torch.zeros(VOCAB, dtype=torch.long), VOCAB)
    if kind == "short":
        return as_vocab_order(torch.arange(3), VOCAB)
    return None if kind == "none" else order_of(int(kind))


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
        ("twice twice short short",
         rf"{DIFFER}.* \({ONCE}\) on ranks 0, 1 and .* \({SHAPE}\) on ranks 2, 3"),
        ("twice twice twice twice", ONCE),  # an error of all ranks is raised as it is
    ],
)  # fmt: skip
@on_ranks("layout")
def test_all_ranks_say_the_same(group, kinds, said, layout):
    """And none waits for another; this rank's own order is returned if nothing is said."""
    tp_group, mesh = layout.meshes()
    groups = [tp_group, *([] if mesh is None else mesh.get_all_groups())]
    mine: list[VocabOrder | None] = []

    def make() -> VocabOrder | None:
        mine.append(make_order(kinds.split()[group.rank()]))
        return mine[0]

    if not said:
        assert agreed_order(make, torch.empty(0), groups) is mine[0]
        return
    with pytest.raises(ValueError) as caught:
        agreed_order(make, torch.empty(0), groups)
    everywhere = [""] * layout.size
    dist.all_gather_object(everywhere, str(caught.value))
    assert re.fullmatch(said, everywhere[0]) and len({*everywhere}) == 1, everywhere
