"""Parts of filtered gradients: their definition by hand, the tokens that profiles are taken from,
and the kernels one by one: lists of the kept tiles, rank one, kept tiles.

T tokens, V vocabulary rows, H hidden size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist import filtered
from flce_dist.filtered.oracle import SAMPLE, sampled_tokens
from flce_dist.kernels.filtered import eager, sample, stats, tile_lists
from flce_dist.kernels.filtered.tiles import TILE_V
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.rows.formulas import TokenStats
from flce_dist.testing import relative_rms
from tests.devices import each_device
from tests.filtered_formula import filtered_gradients, zipf_inputs
from tests.problems import (
    IGNORE,
    Upstream,
    each_dtype,
    interpreted,
    make_inputs,
    poisoned_memory,
    run_op,
)
from tests.test_filtered import EPS
from tests.test_shard_logits import far_apart


def test_a_tile_that_is_kept_by_nothing_is_mass_times_profile() -> None:
    """256 tokens in two blocks; row 0 keeps tile 0. The sample is one token of each pair."""
    golden = (1 + 5**0.5) / 2
    chosen = [2 * i + int(2 * ((i + 1) * golden % 1)) for i in range(128)]
    hidden = torch.full((256, 1), 3.0, dtype=torch.float64)
    hidden[chosen] = 1.0
    weight = torch.zeros(512, 1, dtype=torch.float64)
    weight[0] = 6.0
    weight[256:] = torch.linspace(-1.0, 0.0, 256)[:, None]
    labels = torch.zeros(256, dtype=torch.int64)
    found = filtered.filtered_gradients(hidden, weight, labels, eps=0.1, reduction="sum")
    assert found.kept.tolist() == [[True, False], [True, False]]
    p = (hidden @ weight.T).softmax(1)
    mass = p[:, 256:].sum(1, keepdim=True)
    profile = p[chosen[0], 256:] / mass[chosen[0]]
    p[:, 256:] = mass * profile
    p[:, 0] -= 1
    assert relative_rms(found.dweight, p.T @ hidden) < 1e-14
    assert relative_rms(found.dhidden, p @ weight) < 1e-14
    assert found.rank_one_mass.item() == pytest.approx(mass.mean().item())
    assert found.dbias is None


def test_a_threshold_at_a_probability_is_refused() -> None:
    operands = torch.zeros(4, 2), torch.zeros(512, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"within 1e-05 of eps = 0\.001953125, relative"):
        filtered.filtered_gradients(*operands, eps=1 / 512)
    assert filtered.filtered_gradients(*operands, eps=1.001 / 512).rank_one_mass == 0.5


@pytest.mark.parametrize("way", ["labels", "token_weight", "upstream gradient"])
def test_tokens_without_a_gradient_are_not_sampled(way: str) -> None:
    """They are the first of each of 128 sequences."""
    problem = zipf_inputs(512, 1300, 16, torch.float64, bias=True)
    upstream, first, options = Upstream(), torch.arange(512) % 4 == 0, {}
    if way == "labels":
        problem.labels[first] = IGNORE
    elif way == "token_weight":
        problem = replace(problem, token_weight=(~first).float())
    else:
        upstream, options = Upstream((~first).float()), {"reduction": "none"}
    schedule: Any = filtered.schedule(EPS)
    actual = run_op(problem, upstream, impl="eager", schedule=schedule, **options)
    for name, gradient in filtered_gradients(problem, EPS, upstream, **options).items():
        assert relative_rms(actual[name], gradient) <= 1e-11, name


@pytest.mark.parametrize("n", [0, 1, 2, 127, 128, 129, 255, 1000, 8191, 30_011])
@pytest.mark.parametrize("form", [eager, sample])
@each_device
def test_each_run_of_counted_tokens_gives_one(device: str, form: Any, n: int) -> None:
    """All tokens while they are few; never one twice."""
    counted = torch.zeros(2 * n + 3, dtype=torch.bool)
    counted[torch.randperm(len(counted), generator=torch.Generator().manual_seed(n))[:n]] = True
    labels, scale = torch.zeros_like(counted).long(), torch.ones(len(counted))
    others = (~counted).nonzero().squeeze(1)
    labels[others[::2]], scale[others[1::2]] = -100, 0.0
    found = form.profile_sample(labels.to(device), scale.to(device), ignore_index=-100).cpu()
    used = min(n, SAMPLE)
    assert found[:used].tolist() == sampled_tokens(counted)
    assert counted[found[:used]].all() and (found[used:] == -1).all()
    assert len(found) == SAMPLE and found[:used].unique().numel() == used
    ordinal = (counted.cumsum(0) - 1)[found[:used]]
    assert torch.equal(((ordinal + 1) * used - 1) // max(n, 1), torch.arange(used))


@pytest.mark.parametrize("length", [2, 8, 100, 1024, 4096])
@pytest.mark.parametrize("per_run", [1, 2, 3])
def test_the_sample_has_no_period(length: int, per_run: int) -> None:
    """Of ``per_run`` sequences to a run, it takes tokens from all quarters alike."""
    places = torch.tensor(sampled_tokens(torch.ones(SAMPLE * per_run * length).bool())) % length
    quarters = (places * min(length, 4) // length).bincount(minlength=min(length, 4))
    wanted = SAMPLE / len(quarters)
    assert (quarters >= 0.8 * wanted).all() and (quarters <= 1.2 * wanted).all()


def random_mask(blocks: int, J: int, density: float) -> Tensor:
    g = torch.Generator().manual_seed(blocks * J)
    return torch.rand(blocks, J, generator=g) < density


@each_device
@pytest.mark.parametrize(("kept", "capacity"), [
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
])  # fmt: skip
@poisoned_memory()
def test_every_kept_tile_is_in_its_lists_once(kept, capacity, device):
    kept = kept.to(device)
    blocks, J = kept.shape
    lists = tile_lists.tile_lists(kept, capacity)
    N = blocks * J
    # A round holds whole columns of tiles, so it may be short of full by almost one column.
    assert lists[1:] == (blocks, J, 1 if capacity >= N else -(-N // (capacity - blocks)))
    of_tiles, of_rows, first_tile, column_order, block_order, of_rounds = lists.parts.split(
        [2 * N, 2 * N, J + 1, J, blocks, (lists.rounds + 1) * (2 + blocks)]
    )
    (block, column), (row_column, row_slot) = of_tiles.view(N, 2).T, of_rows.view(N, 2).T
    round_tile, round_column, *row_bounds = of_rounds.view(lists.rounds + 1, -1).T.tolist()
    in_order = kept.T.nonzero().tolist()  # column by column
    count = len(in_order)
    assert torch.stack((column, block), 1)[:count].tolist() == in_order
    assert first_tile.tolist() == [0, *kept.sum(0).cumsum(0).tolist()]
    assert (round_column[0], round_column[-1], round_tile[-1]) == (0, J, count)
    assert round_tile == [first_tile[j] for j in round_column]
    lengths = kept.sum(1).tolist()
    assert block_order.tolist() == sorted(range(blocks), key=lambda b: (-lengths[b], b))
    rows: dict[int, list[int]] = {b: [] for b in range(blocks)}
    for r in range(lists.rounds):
        begin, end = round_column[r], round_column[r + 1]
        assert 0 <= round_tile[r + 1] - round_tile[r] <= capacity
        order = column_order[begin:end].tolist()
        assert order == sorted(range(begin, end), key=lambda j: (-int(kept[:, j].sum()), j))
        for b in range(blocks):
            part = slice(*row_bounds[b][r : r + 2])
            tile = row_slot[part] + round_tile[r]
            rows[b] += row_column[part].tolist()
            assert torch.equal(column[tile], row_column[part])
            assert (block[tile] == b).all()
    assert rows == {b: kept[b].nonzero().squeeze(1).tolist() for b in range(blocks)}


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
