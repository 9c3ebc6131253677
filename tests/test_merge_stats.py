"""The merge of partial statistics, one segment of columns after another.

A limit on partial statistics far below the real one cuts small problems into several segments; a
tile of the interpreter is 32 tokens x 64 columns.
"""

from typing import Any

import pytest
import torch

from flce_dist.kernels import launching, linear_stats
from flce_dist.kernels.launching import TileLaunch
from tests.problems import (
    DTYPES,
    H,
    Inputs,
    Outcome,
    Patch,
    T,
    Upstream,
    V,
    assert_same,
    compare,
    device_of,
    each_schedule,
    make_inputs,
    poisoned_memory,
    run_op,
    with_logits,
)

SOME = {"with_metrics": True, "label_smoothing": 0.1, "z_loss_weight": 0.01}


def cut(monkeypatch: pytest.MonkeyPatch, tiles: int, sums: int, T: int = T) -> None:
    """Let partial statistics, a maximum and ``sums`` of a tile, cover ``tiles`` tiles, no more."""
    limit = 4 * (1 + sums) * T * (tiles + 1) - 1
    monkeypatch.setattr(launching, "MAX_PART_BYTES", limit)


@pytest.fixture
def merged_tiles(mutate: Patch) -> list[int]:
    seen: list[int] = []

    def noting(merge: Any, part: Any, label_logit: Any, launch: TileLaunch, **rest: Any) -> None:
        seen.append(launch.num_v)
        merge(part, label_logit, launch, **rest)

    mutate(linear_stats, "merge_stats", noting)
    return seen


def op(inputs: Inputs, **options: Any) -> Outcome:
    return run_op(inputs, Upstream(0.7), impl="triton", **options)


@pytest.mark.parametrize(
    ("schedule", "dtype"),
    [
        *(("cached", dtype) for dtype in DTYPES),
        *((x, torch.float32) for x in ("recompute", "auto")),
        ("in_forward", torch.bfloat16),
    ],
)
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


@each_schedule
@pytest.mark.parametrize("high", [3, 400, 599], ids=["first", "middle", "last"])
def test_the_maximum_of_any_segment_is_found(monkeypatch, high, schedule):
    """Where a label lies 70 below a column, the rescue needs that column's logit."""
    z = torch.randn(T, V, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(T) + 10
    z[:20, high] = 70.0
    cut(monkeypatch, tiles=4, sums=2)
    inputs = with_logits(z, labels).to(device_of("triton"))
    results = op(inputs, schedule=schedule, with_metrics=True)
    compare(results, inputs, Upstream(0.7))
