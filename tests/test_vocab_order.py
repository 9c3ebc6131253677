"""Orders of the vocabulary: every rank keeps as many tiles as the others."""

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from flce_dist.filtered import frequency_order
from flce_dist.filtered.vocab_order import TILE_V
from tests.meshes import WHOLE, mesh_of
from tests.on_ranks import on_ranks


def test_equal_counts_go_by_token_id_and_bits_do_not_vary():
    for n in (1, 255, 256):
        assert torch.equal(frequency_order(torch.zeros(n)).token_of_row, torch.arange(n))
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


@pytest.mark.parametrize(("counts", "rows", "message"), [
    (torch.zeros(2, 3), None, r"counts must be a tensor \[V_all\], got \(2, 3\)"),
    ([1, 2, 3], None, r"counts must be a tensor \[V_all\], got list"),
    (torch.ones(3, device="meta"), None, "counts must hold data, got a tensor on device meta"),
    (torch.ones(3).to_sparse(), None, "counts must be a dense tensor .* got torch.sparse_coo"),
    (torch.tensor([4, -0.5]), None, "counts must be real numbers of at least 0, got -0.5"),
    (torch.tensor([4, torch.nan]), None, "counts must be real numbers of at least 0, got nan"),
    *((torch.zeros(5), wrong, "padded_vocab_size must be None or an int within "
       rf"\[V_all = 5, 2\*\*63\), got {wrong}") for wrong in (4, 512.0, True)),
])  # fmt: skip
def test_wrong_counts_are_refused(counts, rows, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        frequency_order(counts, padded_vocab_size=rows)


@on_ranks(1)
def test_counts_are_plain(group):
    counts = distribute_tensor(torch.ones(3), mesh_of(1), [WHOLE])
    with pytest.raises(ValueError, match=r"got a DTensor: pass counts.full_tensor\(\)"):
        frequency_order(counts)
