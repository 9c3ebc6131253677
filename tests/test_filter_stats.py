"""Which tiles are kept, and how the mass of the others spreads, against plain PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flce_dist.kernels import gpu
from flce_dist.kernels.column_cache import ColumnCache
from flce_dist.kernels.filtered import stats as filter_stats
from flce_dist.kernels.filtered.tiles import TILE_T, TILE_V, tile_grid
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss_formulas import TokenStats
from tests.filter_problem import (
    DEVICE,
    H,
    T,
    V,
    close,
    label_column,
    logits_of,
    masks,
    shard,
    spread,
)
from tests.problems import interpreted, poisoned_memory
from tests.test_shard_logits import far_apart


def statistics(shard: ShardLogits) -> tuple[Tensor, TokenStats]:
    """What forward knows: the statistics of tiles, and a lse of more than this shard."""
    z, label = logits_of(shard), label_column(shard)
    label_logit = z.masked_fill(~label, 0.0).sum(1).float()
    sums = gpu.new_sums(shard, with_sum_z=False, with_entropy=True)
    tiles = filter_stats.new_tile_stats(shard).fill_(torch.nan)
    arguments: dict[str, Any] = {"with_sum_z": False, "with_entropy": True, "sums": sums}
    others_max = torch.empty_like(label_logit)
    gpu.linear_stats(
        shard, label_logit, cache=ColumnCache(), others_max=others_max, tiles=tiles, **arguments
    )
    lse = (z.logsumexp(1).exp() + 50.0).log().float()
    others = (lse - label_logit).expm1()
    return tiles, TokenStats(label_logit, label_logit, others)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("part_rows", (None, 4))
@poisoned_memory()
def test_a_tile_is_kept_for_its_labels_and_likely_rows(dtype, part_rows, monkeypatch):
    """Also with statistics in several segments."""
    if part_rows is not None:
        monkeypatch.setattr("flce_dist.kernels.launching.MAX_PART_BYTES", 4 * 3 * T * part_rows)
    problem = shard(dtype)
    tiles, stats = statistics(problem)
    eps = 0.004
    kept, mass = filter_stats.kept_tiles(problem, tiles, stats, eps)

    p = (logits_of(problem) - stats.lse.double()[:, None]).exp()
    p = p.where(problem.counted[:, None], 0.0)
    label = label_column(problem)
    expected = torch.zeros_like(kept)
    p_max = torch.zeros(kept.shape, dtype=torch.float64, device=DEVICE)
    expected_mass = torch.zeros(mass.shape, dtype=torch.float64, device=DEVICE)
    for b in range(3):
        for j in range(3):
            t, v = slice(b * TILE_T, (b + 1) * TILE_T), slice(j * TILE_V, (j + 1) * TILE_V)
            p_max[b, j] = p[t, v].masked_fill(label[t, v], 0.0).max()
            expected[b, j] = (p_max[b, j] >= eps) | label[t, v].any()
            if not expected[b, j]:
                expected_mass[j, t] = p[t, v].sum(1)
    assert torch.equal(kept, expected)
    assert 0 < kept.sum() < kept.numel() or T >= TILE_T
    assert torch.equal(mass == 0, expected_mass == 0)
    close(mass, expected_mass, dtype)


def test_a_mass_that_overflowed_keeps_its_tile():
    problem = shard()
    tiles, stats = statistics(problem)
    plain, _ = filter_stats.kept_tiles(problem, tiles, stats, 2.0)
    last = tiles.shape[1] - 1
    tiles[1, 0, 1], tiles[1, last, 130] = torch.inf, torch.nan
    tiles[1, 0, 140] = torch.nan  # of an ignored token
    kept, mass = filter_stats.kept_tiles(problem, tiles, stats, 2.0)
    assert not problem.counted[140]
    plain[0, 0] = plain[1, 2] = True
    assert torch.equal(kept, plain)
    assert mass.isfinite().all()


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize(("T", "dtype"), ((T, torch.float32), (90, torch.bfloat16)), ids=str)
@poisoned_memory()
def test_the_profile_is_the_mean_of_a_sample(T, dtype, bias):
    problem = shard(dtype, T=T, bias=bias)
    z = logits_of(problem)
    lse = z.logsumexp(1).float()
    kept = masks()["some"][: tile_grid(T, V)[0]].clone()
    kept[:, 2] = True  # of which no token is left
    sample = torch.arange(1, T, 5, device=DEVICE)
    sample = sample[problem.counted[sample]]
    q = filter_stats.tile_profile(problem, lse, kept, F.pad(sample, (0, 20), value=-1))

    p = (z - lse.double()[:, None]).exp().masked_fill(spread(kept, T), 0.0)[sample].sum(0)
    even = torch.ones_like(p)
    if bias:
        even[::9] = 0.0
    for start in range(0, V, TILE_V):
        tile = p[start : start + TILE_V]
        expected = tile if tile.sum() > 0 else even[start : start + TILE_V]
        close(q[start : start + TILE_V], expected / expected.sum(), torch.float32)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("layout", ("rows", "columns", "padded"))
@poisoned_memory()
def test_tile_means(dtype, layout):
    weight = shard(dtype).weight
    if layout == "columns":
        weight = weight.T.contiguous().T
    if layout == "padded":
        weight = torch.cat((weight, weight), 1)[:, 3 : H + 3]
    q = torch.rand(V, device=DEVICE)
    tiles = zip(q.double().split(TILE_V), weight.double().split(TILE_V), strict=True)
    close(filter_stats.tile_means(q, weight), torch.stack([a @ b for a, b in tiles]), dtype)


@interpreted
def test_tile_means_of_columns_more_than_2_to_the_31_elements_apart():
    weight, q = shard(torch.bfloat16).weight, torch.rand(V)
    near, far = (filter_stats.tile_means(q, x) for x in (weight, far_apart(weight)))
    assert torch.equal(near, far)
