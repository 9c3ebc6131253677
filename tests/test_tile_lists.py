"""The lists of kept tiles, whichever tiles are kept."""

import pytest
import torch
from torch import Tensor

from flce_dist.kernels.filtered import tile_lists
from tests.problems import poisoned_memory
from tests.test_gpu_oracle import each_device


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
    assert lists.rounds == round_count(blocks, J, capacity)
    in_order = kept.T.nonzero().tolist()  # column by column
    count = len(in_order)
    assert torch.stack((lists.column, lists.block), 1)[:count].tolist() == in_order
    assert lists.first_tile.tolist() == [0, *kept.sum(0).cumsum(0).tolist()]
    round_column, round_tile = lists.round_column.tolist(), lists.round_tile.tolist()
    assert (round_column[0], round_column[-1], round_tile[-1]) == (0, J, count)
    assert round_tile == [lists.first_tile[j] for j in round_column]
    rows: dict[int, list[int]] = {b: [] for b in range(blocks)}
    for r in range(lists.rounds):
        begin, end = round_column[r], round_column[r + 1]
        assert 0 <= round_tile[r + 1] - round_tile[r] <= capacity
        order = lists.column_order[begin:end].tolist()
        assert order == sorted(range(begin, end), key=lambda j: (-int(kept[:, j].sum()), j))
        lengths = kept[:, begin:end].sum(1).tolist()
        order = lists.block_order[r].tolist()
        assert order == sorted(range(blocks), key=lambda b: (-lengths[b], b))
        for b in range(blocks):
            part = slice(int(lists.row_bounds[r, b]), int(lists.row_bounds[r + 1, b]))
            slots = lists.row_slot.flatten()[part] + round_tile[r]
            rows[b] += lists.row_column.flatten()[part].tolist()
            assert torch.equal(lists.column[slots], lists.row_column.flatten()[part])
            assert (lists.block[slots] == b).all()
    assert rows == {b: kept[b].nonzero().squeeze(1).tolist() for b in range(blocks)}
