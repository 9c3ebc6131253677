"""The merge of partial statistics, one segment of columns after another.

A limit on partial statistics far below the real one cuts small problems into several segments; a
tile of the interpreter is 32 tokens x 64 columns.
"""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flce_dist.kernels import tuning
from flce_dist.kernels.logits import launching, linear_stats
from flce_dist.kernels.logits.launching import TileLaunch, segment_columns
from flce_dist.kernels.logits.operands import ShardLogits
from tests.outcomes import Outcome, assert_same
from tests.problems import (
    DTYPES,
    H,
    Inputs,
    Patch,
    T,
    Upstream,
    V,
    compare,
    make_inputs,
    poisoned_memory,
    run_op,
)

SOME: dict[str, Any] = {"with_metrics": True, "label_smoothing": 0.1, "z_loss_weight": 0.01}


def cut(monkeypatch: pytest.MonkeyPatch, tiles: int, sums: int, T: int = T) -> None:
    """Let partial statistics, a maximum and ``sums`` of a tile, cover ``tiles`` tiles, no more."""
    limit = 4 * (1 + sums) * T * (tiles + 1) - 1
    monkeypatch.setattr(launching, "MAX_PART_BYTES", limit)


@pytest.fixture
def merged_tiles(mutate: Patch) -> list[int]:
    seen: list[int] = []

    def noting(
        merge: Any, part: Any, label_logit: Any, launch: TileLaunch, *others: Any, **rest: Any
    ) -> None:
        seen.append(launch.num_v)
        merge(part, label_logit, launch, *others, **rest)

    mutate(linear_stats, "merge_stats", noting)
    return seen


def op(inputs: Inputs, **options: Any) -> Outcome:
    return run_op(inputs, Upstream(0.7), impl="triton", **options)


@pytest.mark.parametrize(("schedule", "dtype"), [
    *(("cached", dtype) for dtype in DTYPES),
    *((x, torch.float32) for x in ("recompute", "auto")),
    ("in_forward", torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize(
    ("T", "V", "H"),
    # On a GPU tiles are 64 to 256 columns wide; 5000 columns fill no whole number of any.
    [(T, V, H), pytest.param(300, 5000, 128, marks=pytest.mark.gpu)],
)
def test_segments_change_nothing(monkeypatch, merged_tiles, T, V, H, schedule, dtype):
    """Partial statistics are a maximum, a sum, and what metrics and smoothing need.

    ``auto`` caches some columns: within what is one segment at first, then the end of one.
    """
    given = make_inputs(T, V, H, dtype, bias=True, token_weight=True)
    budget = int(0.86 * V) * T * dtype.itemsize if schedule == "auto" else None
    how: dict[str, Any] = {"schedule": schedule, "max_logits_bytes": budget, **SOME}
    whole = op(given, **how)
    uncut = merged_tiles.copy()
    assert len(uncut) == (2 if schedule == "auto" else 1)
    merged_tiles.clear()
    cut(monkeypatch, tiles=4, sums=3, T=T)
    with poisoned_memory():
        cut_up = op(given, **how)
    assert sum(merged_tiles) == sum(uncut)
    assert len(merged_tiles) > 2 and max(merged_tiles) == 4
    assert_same(cut_up, whole)
    compare(cut_up, given, Upstream(0.7), **SOME)


def shape(T: int, V: int) -> ShardLogits:
    """Logits of which only the shape is real."""
    hidden, weight = (torch.empty(1, 1, dtype=torch.bfloat16).expand(n, 4096) for n in (T, V))
    labels = torch.empty(1, dtype=torch.int64).expand(T)
    return ShardLogits(hidden, weight, None, labels, 0, -100, 1.0, None)


@given(
    st.integers(1, 1 << 17), st.integers(1, 300_000), st.integers(1, 3), st.integers(1, 160),
    st.sampled_from([None, 32]),
)  # fmt: skip
@example(8192, 69632, 1, 132, None)  # as many tiles as the limit allows: not cut
@example(8192, 128256, 1, 132, None)  # 64 blocks of tokens: 33 tiles of columns are 16 waves
@example(131072, 262144, 1, 132, None)  # 33 would pass the limit: waves are not whole
@example(1 << 23, 128256, 3, 132, None)  # one tile, though it passes the limit
@example(8192, 128256, 2, 132, 32)  # a tile has a maximum and 8 groups
def test_segments_are_within_the_limit_and_of_whole_waves(T, V, sums, programs, group_v):
    logits = shape(T, V)._replace(group_v=group_v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "device_arch", lambda device: ("sm_90", programs))
        columns, num_v, rows = segment_columns(logits, sums)
        config = launching.tile_launch(shape(T, 1), pointers=True).config
    most = 40 << 20 if group_v else 17 << 20
    assert columns == num_v * config.BLOCK_V
    assert rows == 1 + sums * (config.BLOCK_V // group_v if group_v else 1)
    tiles = -(-V // config.BLOCK_V)
    fit = [n for n in range(1, tiles + 1) if n == 1 or 4 * rows * T * n <= most]
    if fit[-1] == tiles:
        assert num_v == tiles
    else:
        whole = [n for n in fit if n * -(-T // config.BLOCK_T) % programs == 0]
        assert num_v == max(whole or fit)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("T", [1, 64, 65, 128, 129, 8192])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_tile_that_is_cached_is_as_wide_as_one_that_is_not(arch, itemsize, T):
    """A segment is cut into tiles before it is known whether the cache reaches it."""
    plain, stores = (tuning.tile_config(arch, itemsize, T, stores) for stores in (False, True))
    assert plain.BLOCK_V == stores.BLOCK_V
