"""The merge of partial statistics, one segment of columns after another.

A limit on partial statistics far below the real one cuts small problems into several segments.
T tokens, V vocabulary rows, H hidden size; a tile of the interpreter is 32 tokens x 64 columns.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flce_dist.kernels import launching, linear_stats, merge_stats
from flce_dist.kernels.column_cache import ColumnCache
from flce_dist.kernels.interface import kernels_of
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss_formulas import LossTerms
from flce_dist.options import Schedule
from tests.problems import (
    METRICS,
    Inputs,
    Outcome,
    T,
    Upstream,
    V,
    assert_same,
    compare,
    device_of,
    each_dtype,
    each_schedule,
    inputs,
    interpreted,
    make_inputs,
    metric_upstream,
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
def merged_tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiles of columns in each segment that was merged, in order."""
    seen: list[int] = []

    def merge(kernel: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        seen.append(args[4])
        kernel(*args, **kwargs)

    around_merge(monkeypatch, merge)
    return seen


def around_merge(monkeypatch: pytest.MonkeyPatch, wrapper: Callable[..., None]) -> None:
    """Let ``wrapper(kernel, *args, **kwargs)`` launch the merge of partial statistics."""
    original = merge_stats._merge_kernel

    class Wrapped:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **kwargs: wrapper(original[grid], *args, **kwargs)

    monkeypatch.setattr(merge_stats, "_merge_kernel", Wrapped())


def op(inputs: Inputs, **options: Any) -> Outcome:
    return run_op(inputs, Upstream(0.7), impl="triton", **options)


# --- the same results


@interpreted
@each_dtype
@each_schedule
def test_segments_change_nothing(
    monkeypatch: pytest.MonkeyPatch, merged_tiles: list[int], schedule: Schedule, dtype: torch.dtype
) -> None:
    """Partial statistics are a maximum, a sum, and what metrics and smoothing need."""
    given = inputs(dtype)
    whole = op(given, schedule=schedule, **SOME)
    assert merged_tiles == [10]
    cut(monkeypatch, tiles=4, sums=3)
    with poisoned_memory():
        cut_up = op(given, schedule=schedule, **SOME)
    assert merged_tiles[1:] == [4, 4, 2]
    assert_same(cut_up, whole)
    compare(cut_up, given, Upstream(0.7), **SOME)


@pytest.mark.gpu
@each_dtype
@each_schedule
def test_segments_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, merged_tiles: list[int], schedule: Schedule, dtype: torch.dtype
) -> None:
    """Tiles are 64 to 256 columns wide there; 5000 columns fill no whole number of any."""
    inputs = make_inputs(300, 5000, 128, dtype, bias=True, token_weight=True)
    whole = op(inputs, schedule=schedule, **SOME)
    cut(monkeypatch, tiles=7, sums=3, T=300)
    cut_up = op(inputs, schedule=schedule, **SOME)
    first, *rest = merged_tiles
    assert sum(rest) == first
    assert set(rest[:-1]) == {7} and rest[-1] < 7
    assert_same(cut_up, whole)
    compare(cut_up, inputs, Upstream(0.7), **SOME)


@interpreted
@pytest.mark.parametrize(
    ("columns", "tiles", "uncut", "segments"),
    [(512, 4, [8, 2], [4, 4, 2]), (512, 6, [8, 2], [6, 2, 2])],
    ids=["whole segments", "within a segment"],
)
def test_a_cache_that_ends_before_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
    merged_tiles: list[int],
    columns: int,
    tiles: int,
    uncut: list[int],
    segments: list[int],
) -> None:
    """The window of backward takes 64 columns' budget, the cache what is left of it."""
    given = inputs()
    monkeypatch.setattr("flce_dist.op.plan._MIN_WINDOW", 64)
    monkeypatch.setattr("flce_dist.op.plan._MAX_WINDOW", 64)
    options: dict[str, Any] = {"schedule": "auto", "max_logits_bytes": 4 * T * (columns + 64)}
    caches: list[int] = []
    original = linear_stats.linear_stats

    def spy(*args: Any, cache: ColumnCache, **kwargs: Any) -> Any:
        caches.append(cache.width)
        return original(*args, cache=cache, **kwargs)

    monkeypatch.setattr("flce_dist.kernels.gpu.linear_stats", spy)
    whole = op(given, **SOME, **options)
    cut(monkeypatch, tiles=tiles, sums=3)
    with poisoned_memory():
        cut_up = op(given, **SOME, **options)
    assert caches == [columns] * 2
    assert merged_tiles == [*uncut, *segments]
    assert_same(cut_up, whole)
    compare(cut_up, given, Upstream(0.7), **SOME)


@interpreted
@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_a_cache_of_several_windows(
    monkeypatch: pytest.MonkeyPatch, merged_tiles: list[int], impl: str
) -> None:
    """Statistics and rescue fill windows of any widths as they fill one, up to rounding."""
    kernels = kernels_of(impl)
    z = torch.randn(T, V, generator=torch.Generator().manual_seed(0))
    z[::3, 130], z[1::3, 400] = 60.0, 200.0
    inputs = with_logits(z, torch.arange(T) + 10)
    logits = ShardLogits(
        hidden=inputs.hidden,
        weight=inputs.weight,
        bias=None,
        labels=inputs.labels,
        vocab_start_index=0,
        ignore_index=-100,
        logit_scale=1.0,
        softcap=None,
    )
    terms = LossTerms(0.0, 0.0, V, 1.0, None, ignore_index=-100)
    cut(monkeypatch, tiles=2, sums=2)

    def fill(*widths: int) -> list[torch.Tensor]:
        cache = ColumnCache(tuple(torch.full((T, width), torch.nan) for width in widths))
        label_logit, others_max = torch.empty(2, T)
        sums = kernels.new_sums(logits, with_sum_z=False, with_entropy=True)
        kernels.label_logit(logits, vocab_size=V, out=label_logit)
        kernels.linear_stats(
            logits, label_logit, cache=cache, with_sum_z=False, with_entropy=True,
            others_max=others_max, sums=sums,
        )  # fmt: skip
        sums = kernels.rescue(logits, label_logit, others_max, sums, cache=cache, with_entropy=True)
        stats, loss, _ = kernels.token_loss(
            logits.labels, None, label_logit, others_max, sums, terms, with_entropy=True
        )
        assert stats.sum_ez is not None
        return [others_max, stats.others, stats.sum_ez, loss, torch.cat(cache.windows, dim=1)]

    whole, windows = fill(500), fill(100, 200, 200)
    if impl == "triton":
        assert merged_tiles == [2] * 11
    assert all(x.isfinite().all() for x in windows)
    for one, other in zip(windows, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0.0)


@interpreted
def test_gradients_of_metrics(monkeypatch: pytest.MonkeyPatch, merged_tiles: list[int]) -> None:
    given, upstream = inputs(), Upstream(0.7, metric_upstream(T, *METRICS))
    cut(monkeypatch, tiles=4, sums=2)
    results = run_op(given, upstream, impl="triton", softcap=5.0)
    assert merged_tiles == [4, 4, 2]
    compare(results, given, upstream, softcap=5.0)


@each_schedule
@pytest.mark.parametrize("high", [3, 400, 599], ids=["first", "middle", "last"])
def test_the_maximum_of_any_segment_is_found(
    monkeypatch: pytest.MonkeyPatch, high: int, schedule: Schedule
) -> None:
    """Where a label lies 70 below a column, the rescue needs that column's logit."""
    z = torch.randn(T, V, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(T) + 10
    z[:20, high] = 70.0
    cut(monkeypatch, tiles=4, sums=2)
    inputs = with_logits(z, labels).to(device_of("triton"))
    results = op(inputs, schedule=schedule, with_metrics=True)
    compare(results, inputs, Upstream(0.7))
