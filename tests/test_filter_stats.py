"""The mean rows of tiles against plain PyTorch, and masses that overflowed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flce_dist.kernels.filtered import stats
from flce_dist.kernels.filtered.tiles import TILE_V
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss_formulas import TokenStats
from flce_dist.testing import relative_rms
from tests.problems import each_dtype, interpreted, make_inputs, poisoned_memory
from tests.test_shard_logits import far_apart

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
def test_tile_means(dtype: torch.dtype, layout: str) -> None:
    weight = LAYOUTS[layout](make_inputs(1, 700, 40, dtype).weight)
    q = torch.rand(700)
    tiles = zip(q.double().split(TILE_V), weight.double().split(TILE_V), strict=True)
    wanted = torch.stack([a @ b for a, b in tiles])
    assert relative_rms(stats.tile_means(q, weight), wanted) < torch.finfo(dtype).eps + 1e-6


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
