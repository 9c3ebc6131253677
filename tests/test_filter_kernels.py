"""The kernels of filtered gradients one by one: lists of the kept tiles, rank one, kept tiles."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flce_dist.kernels.filtered import stats, tile_lists
from flce_dist.kernels.filtered.tiles import TILE_V
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss_formulas import TokenStats
from flce_dist.testing import relative_rms
from tests.problems import each_dtype, interpreted, make_inputs, poisoned_memory
from tests.test_gpu_oracle import each_device
from tests.test_shard_logits import far_apart


def random_mask(blocks: int, J: int, density: float) -> Tensor:
    g = torch.Generator().manual_seed(blocks * J)
    return torch.rand(blocks, J, generator=g) < density


def round_count(blocks: int, columns: int, capacity: int) -> int:
    """The rounds that suffice whichever tiles are kept, ``capacity`` tiles at a time.

    A round holds whole columns of tiles, so it may be short of full by almost one column.
    """
    if capacity >= blocks * columns:
        return 1
    return -(-blocks * columns // (capacity - blocks))


@each_device
@pytest.mark.parametrize(
    ("kept", "capacity"),
    [
        *(
            (random_mask(3, 3, density), capacity)
            for density in (0.0, 0.5, 1.0)
            for capacity in (6, 7, 9, 100)
        ),
        (random_mask(1, 1, 1.0), 2),
        (random_mask(7, 40, 0.2), 14),
        (random_mask(7, 40, 0.9), 30),
        (random_mask(70, 5, 0.4), 140),
        (random_mask(2, 150, 0.1), 20),
    ],
)
@poisoned_memory()
def test_every_kept_tile_is_in_its_lists_once(kept, capacity, device):
    kept = kept.to(device)
    blocks, J = kept.shape
    lists = tile_lists.tile_lists(kept, capacity)
    assert lists[1:] == (blocks, J, round_count(blocks, J, capacity))
    N = blocks * J
    of_tiles, of_rows, first_tile, column_order, of_rounds = lists.parts.split(
        [2 * N, 2 * N, J + 1, J, (lists.rounds + 1) * (2 + 2 * blocks)]
    )
    (block, column), (row_column, row_slot) = of_tiles.view(N, 2).T, of_rows.view(N, 2).T
    round_tile, round_column, *of_blocks = of_rounds.view(lists.rounds + 1, -1).T.tolist()
    row_bounds, block_order = of_blocks[:blocks], of_blocks[blocks:]
    in_order = kept.T.nonzero().tolist()  # column by column
    count = len(in_order)
    assert torch.stack((column, block), 1)[:count].tolist() == in_order
    assert first_tile.tolist() == [0, *kept.sum(0).cumsum(0).tolist()]
    assert (round_column[0], round_column[-1], round_tile[-1]) == (0, J, count)
    assert round_tile == [first_tile[j] for j in round_column]
    rows: dict[int, list[int]] = {b: [] for b in range(blocks)}
    for r in range(lists.rounds):
        begin, end = round_column[r], round_column[r + 1]
        assert 0 <= round_tile[r + 1] - round_tile[r] <= capacity
        order = column_order[begin:end].tolist()
        assert order == sorted(range(begin, end), key=lambda j: (-int(kept[:, j].sum()), j))
        lengths = kept[:, begin:end].sum(1).tolist()
        order = [places[r] for places in block_order]
        assert order == sorted(range(blocks), key=lambda b: (-lengths[b], b))
        for b in range(blocks):
            part = slice(*row_bounds[b][r : r + 2])
            tile = row_slot[part] + round_tile[r]
            rows[b] += row_column[part].tolist()
            assert torch.equal(column[tile], row_column[part])
            assert (block[tile] == b).all()
    assert rows == {b: kept[b].nonzero().squeeze(1).tolist() for b in range(blocks)}


# --- rank one, and masses that overflowed


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "columns": lambda x: x.T.contiguous().T,
    "padded": lambda x: torch.cat((x, x), 1)[:, 3 : x.shape[1] + 3],
    "columns more than 2 ** 31 elements apart": far_apart,
}


@interpreted
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@poisoned_memory()
def test_factors_of_rank_one(dtype: torch.dtype, layout: str) -> None:
    weight = LAYOUTS[layout](make_inputs(1, 700, 40, dtype).weight)
    total = torch.rand(700)
    q = [part / part.sum() for part in total.double().split(TILE_V)]
    wanted = torch.stack([a @ b for a, b in zip(q, weight.double().split(TILE_V), strict=True)])
    mass, scale = torch.rand(3, 1100).to(dtype), torch.rand(1100)
    logits = ShardLogits(weight, weight, None, mass.long(), 0, -100, 1.0, None)
    found, means, scaled = stats.rank_one(logits, total, mass, scale, with_means=True)
    assert means is not None and relative_rms(means, wanted) < torch.finfo(dtype).eps + 1e-6
    assert relative_rms(found, torch.cat(q)) < 1e-6
    assert torch.equal(scaled, (mass * scale).to(dtype))


@interpreted
def test_a_mass_that_overflowed_keeps_its_tile() -> None:
    """No label is of this shard, and no probability reaches eps."""
    labels, zero = torch.full((140,), 5000), torch.zeros(140)
    labels[130] = -100
    hidden, weight = torch.zeros(140, 8), torch.zeros(700, 8)
    logits = ShardLogits(hidden, weight, None, labels, 0, -100, 1.0, None)
    tiles = stats.new_tile_stats(logits)
    tiles[0], tiles[1] = -torch.inf, 0.0
    tiles[1, 0, 1], tiles[1, -1, 139], tiles[1, 0, 130] = torch.inf, torch.nan, torch.nan
    kept, mass = stats.kept_tiles(logits, tiles, TokenStats(zero, zero, zero + 1), 0.5)
    assert kept.tolist() == [[True, False, False], [False, False, True]]
    assert not mass.any()
