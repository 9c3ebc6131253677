"""The GEMMs of kept tiles against plain PyTorch, whichever tiles are kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flce_dist.kernels.filtered import gpu as filter_gpu
from flce_dist.kernels.filtered import tile_lists
from flce_dist.kernels.filtered.tiles import TILE_V, tile_grid
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import RowGradient
from tests.filter_problem import (
    DEVICE,
    H,
    close,
    label_column,
    logits_of,
    masks,
    shard,
    spread,
)
from tests.problems import poisoned_memory


def factors(shard: ShardLogits, *, folded: bool) -> RowGradient:
    """Factors of D relative to lse; those of ignored tokens are finite."""
    g = torch.Generator().manual_seed(1)
    lse = logits_of(shard).logsumexp(1).float()
    scale, value = (torch.randn(shard.T, generator=g).to(DEVICE) for _ in range(2))
    return RowGradient(None if folded else scale, lse, value, (scale,) if folded else (), None)


def dense_d(shard: ShardLogits, rows: RowGradient, kept: Tensor) -> Tensor:
    """[T, V] in fp64: 0 outside of kept tiles and in ignored rows."""
    d = (logits_of(shard) - rows.reference.double()[:, None]).exp()
    if rows.affine:
        d = d * rows.affine[0].double()[:, None]
    d = torch.where(label_column(shard), rows.label_value.double()[:, None], d)
    return d.where(spread(kept, shard.T, shard.V) & shard.counted[:, None], 0.0)


def gradients(
    shard: ShardLogits, rows: RowGradient, kept: Tensor, capacity: int, **options: Any
) -> dict[str, Tensor]:
    """Run all rounds. Gradients begin with what the kernels are to add to, or with NaN."""
    lists = tile_lists.tile_lists(kept, capacity)
    out = new_gradients(shard, **options)
    d = filter_gpu.new_kept_buffer(shard, capacity)
    hidden = shard.hidden.where(shard.counted[:, None], 0.0)
    profile = of_rank_one(shard)
    for r in range(lists.rounds):
        d.fill_(torch.nan)
        assert filter_gpu.kept_dlogits(shard, rows, lists, r, out=d) is d
        filter_gpu.add_kept_dhidden(d, shard.weight, lists, r, out["dhidden"])
        filter_gpu.kept_dweight(
            d, hidden, lists, r, profile["q"], profile["hbar"],
            profile["row"] if options.get("with_row") else None,
            out=out["dweight"], accumulates=options.get("accumulates", False),
        )  # fmt: skip
        filter_gpu.add_kept_dbias(d, rows.scale, lists, r, out["dbias"])
    return out


def of_rank_one(shard: ShardLogits) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2)
    J = tile_grid(shard.T, shard.V)[1]
    shapes = {"q": (shard.V,), "hbar": (J, shard.H), "row": (shard.H,)}
    return {k: torch.randn(*shape, generator=g).to(DEVICE) for k, shape in shapes.items()}


def new_gradients(
    shard: ShardLogits,
    *,
    out_dtype: torch.dtype | None = None,
    accumulates: bool = False,
    with_row: bool = False,
) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    dweight = torch.full((shard.V, shard.H), torch.nan)
    if accumulates:
        dweight = torch.randn(shard.V, shard.H, generator=g)
    return {
        "dhidden": torch.randn(shard.T, shard.H, generator=g).to(DEVICE),
        "dweight": dweight.to(DEVICE, out_dtype or shard.weight.dtype),
        "dbias": torch.randn(shard.V, generator=g).to(DEVICE),
    }


def expected_gradients(
    shard: ShardLogits, rows: RowGradient, kept: Tensor, **options: Any
) -> dict[str, Tensor]:
    before = {k: x.double() for k, x in new_gradients(shard, **options).items()}
    profile = {k: x.double() for k, x in of_rank_one(shard).items()}
    hidden = shard.hidden.double().where(shard.counted[:, None], 0.0)
    d = dense_d(shard, rows, kept)
    scale = rows.scale.double() if rows.scale is not None else torch.ones_like(d[:, 0])
    hbar = profile["hbar"].repeat_interleave(TILE_V, 0)[: shard.V]
    dweight = d.T @ hidden + profile["q"][:, None] * hbar
    if options.get("with_row"):
        dweight += profile["row"]
    if options.get("accumulates"):
        dweight += before["dweight"]
    return {
        "dhidden": before["dhidden"] + d @ shard.weight.double(),
        "dweight": dweight,
        "dbias": before["dbias"] + scale @ d,
    }


def compare(
    shard: ShardLogits,
    kept: Tensor,
    capacity: int = 6,
    *,
    folded: bool | None = None,
    **options: Any,
) -> None:
    dtype = shard.hidden.dtype
    rows = factors(shard, folded=dtype != torch.float16 if folded is None else folded)
    results = gradients(shard, rows, kept, capacity, **options)
    for name, truth in expected_gradients(shard, rows, kept, **options).items():
        try:
            close(results[name], truth, dtype)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("mask", masks().values(), ids=masks())
@pytest.mark.parametrize("capacity", (6, 9))
@poisoned_memory()
def test_gradients_of_kept_tiles(mask, capacity):
    """In three rounds or in one; D is finite wherever a kernel reads it."""
    compare(shard(), mask, capacity)


@pytest.mark.parametrize(
    ("dtype", "H", "bias", "options"),
    [
        (torch.bfloat16, 40, False, {}),
        (torch.bfloat16, 41, True, {"out_dtype": torch.float32, "accumulates": True}),
        (torch.bfloat16, 40, False, {"accumulates": True, "with_row": True}),
        (torch.float16, 40, False, {}),
        (torch.float16, 96, True, {"with_row": True}),
        (torch.float32, 33, True, {"folded": False, "with_row": True}),
        (torch.float32, 64, False, {"accumulates": True}),
    ],
    ids=str,
)
@poisoned_memory()
def test_gradients_with_options(dtype, H, bias, options):
    compare(shard(dtype, H=H, bias=bias), masks()["some"], **options)


@pytest.mark.parametrize("mask", ("no column", "none"))
@poisoned_memory()
def test_columns_without_tiles_are_added_to_once(mask):
    """Rank one is all that they get, in one of three rounds."""
    compare(shard(torch.bfloat16), masks()[mask], accumulates=True, out_dtype=torch.float32)


@pytest.mark.parametrize(("T", "V"), ((1, 1), (128, 256), (40, 300), (129, 257)))
@poisoned_memory()
def test_sizes(T, V):
    blocks, J = tile_grid(T, V)
    compare(shard(T=T, V=V), torch.ones(blocks, J, dtype=torch.bool, device=DEVICE), 2 * blocks)


@poisoned_memory()
def test_columns_that_do_not_exist_reach_nothing():
    """Where lse is far below 0, the exponential of a logit of 0 would overflow."""
    problem = shard(bias=True)
    assert problem.bias is not None
    compare(replace(problem, bias=problem.bias - 500.0), masks()["all"])


@poisoned_memory()
def test_strided_operands():
    """Rows that TMA cannot address, and weight by columns."""
    problem = shard()
    hidden = torch.cat((problem.hidden, problem.hidden), 1)[:, 1 : H + 1]
    weight = problem.weight.T.contiguous().T
    compare(replace(problem, hidden=hidden, weight=weight), masks()["some"])
