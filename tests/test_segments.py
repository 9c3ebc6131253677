"""Long vocabularies are walked in segments, so that partial statistics stay small.

A limit on them that is far below the real one cuts small problems into as many segments.
T tokens, V vocabulary rows, H hidden size; a tile of the interpreter is 32 tokens x 64 columns.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flce_dist.kernels import launching, linear_stats, merge_stats, tuning
from flce_dist.kernels.column_cache import ColumnCache
from flce_dist.kernels.launching import Segment, segment_columns
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss_formulas import LossTerms
from flce_dist.op.prepare import kernels_of
from flce_dist.options import Schedule
from tests.oracle import (
    METRICS,
    Inputs,
    Outcome,
    Upstream,
    compare,
    device_of,
    make_inputs,
    metric_upstream,
    run_op,
)
from tests.problems import assert_same, each_dtype, each_schedule, poisoned_memory, with_logits

T, V, H = 40, 600, 24  # 10 tiles of columns, the last of 24
SOME = {"with_metrics": True, "label_smoothing": 0.1, "z_loss_weight": 0.01}

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="counts tiles of the interpreter"
)


def cut(monkeypatch: pytest.MonkeyPatch, tiles: int, sums: int, T: int = T) -> None:
    """Let partial statistics, a maximum and ``sums`` of a tile, cover ``tiles`` tiles, no more."""
    limit = 4 * (1 + sums) * T * (tiles + 1) - 1
    monkeypatch.setattr(launching, "MAX_PART_BYTES", limit)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
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


def problem(dtype: torch.dtype = torch.float32) -> Inputs:
    return make_inputs(T, V, H, dtype, bias=True, token_weight=True)


def op(inputs: Inputs, **options: Any) -> Outcome:
    return run_op(inputs, Upstream(0.7), impl="triton", **options)


# --- the same results


@interpreted
@each_dtype
@each_schedule
def test_segments_change_nothing(
    monkeypatch: pytest.MonkeyPatch, walked: list[int], schedule: Schedule, dtype: torch.dtype
) -> None:
    """Partial statistics are a maximum, a sum, and what metrics and smoothing need."""
    inputs = problem(dtype)
    whole = op(inputs, schedule=schedule, **SOME)
    assert walked == [10]
    cut(monkeypatch, tiles=4, sums=3)
    with poisoned_memory():
        cut_up = op(inputs, schedule=schedule, **SOME)
    assert walked[1:] == [4, 4, 2]
    assert_same(cut_up, whole)
    compare(cut_up, inputs, Upstream(0.7), **SOME)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_dtype
@each_schedule
def test_segments_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, walked: list[int], schedule: Schedule, dtype: torch.dtype
) -> None:
    """Tiles are 64 to 256 columns wide there; 5000 columns fill no whole number of any."""
    inputs = make_inputs(300, 5000, 128, dtype, bias=True, token_weight=True)
    whole = op(inputs, schedule=schedule, **SOME)
    cut(monkeypatch, tiles=7, sums=3, T=300)
    cut_up = op(inputs, schedule=schedule, **SOME)
    first, *rest = walked
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
    walked: list[int],
    columns: int,
    tiles: int,
    uncut: list[int],
    segments: list[int],
) -> None:
    """The window of backward takes 64 columns' budget, the cache what is left of it."""
    inputs = problem()
    monkeypatch.setattr("flce_dist.op.plan._MIN_WINDOW", 64)
    monkeypatch.setattr("flce_dist.op.plan._MAX_WINDOW", 64)
    options: dict[str, Any] = {"schedule": "auto", "max_logits_bytes": 4 * T * (columns + 64)}
    caches: list[int] = []
    original = linear_stats.linear_stats

    def spy(*args: Any, cache: ColumnCache, **kwargs: Any) -> Any:
        caches.append(cache.width)
        return original(*args, cache=cache, **kwargs)

    monkeypatch.setattr("flce_dist.kernels.gpu.linear_stats", spy)
    whole = op(inputs, **SOME, **options)
    cut(monkeypatch, tiles=tiles, sums=3)
    with poisoned_memory():
        cut_up = op(inputs, **SOME, **options)
    assert caches == [columns] * 2
    assert walked == [*uncut, *segments]
    assert_same(cut_up, whole)
    compare(cut_up, inputs, Upstream(0.7), **SOME)


@interpreted
@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_a_cache_of_several_windows(
    monkeypatch: pytest.MonkeyPatch, walked: list[int], impl: str
) -> None:
    """Statistics and rescue fill windows of any widths as they fill one, up to rounding."""
    kernels = kernels_of(impl)
    z = torch.randn(T, V, generator=torch.Generator().manual_seed(0))
    z[::3, 130], z[1::3, 400] = 60.0, 200.0
    inputs = with_logits(z, torch.arange(T) + 10)
    logits = replace(shape(T, V), hidden=inputs.hidden, weight=inputs.weight, labels=inputs.labels)
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
        assert walked == [2] * 11
    assert all(x.isfinite().all() for x in windows)
    for one, other in zip(windows, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0.0)


@interpreted
def test_gradients_of_metrics(monkeypatch: pytest.MonkeyPatch, walked: list[int]) -> None:
    inputs, upstream = problem(), Upstream(0.7, metric_upstream(T, *METRICS))
    cut(monkeypatch, tiles=4, sums=2)
    results = run_op(inputs, upstream, impl="triton", softcap=5.0)
    assert walked == [4, 4, 2]
    compare(results, inputs, upstream, softcap=5.0)


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


# --- mistakes that these comparisons notice


def twice(kernel: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    kernel(*args, **kwargs)
    kernel(*args, **{**kwargs, "FIRST": False})


def left_out(kernel: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if args[4] == 4:  # not the last, shorter one
        kernel(*args, **kwargs)


def alone(kernel: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    kernel(*args, **{**kwargs, "FIRST": True})


@interpreted
@pytest.mark.parametrize("mistake", [twice, left_out, alone])
def test_a_segment_merged_wrongly(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., None]
) -> None:
    cut(monkeypatch, tiles=4, sums=3)
    around_merge(monkeypatch, mistake)
    with pytest.raises(AssertionError, match="loss: "):
        compare(op(problem(), **SOME), problem(), Upstream(0.7), **SOME)


@interpreted
def test_the_cache_of_a_later_segment_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    original = launching.TileLaunch.output

    def elsewhere(launch: launching.TileLaunch, x: torch.Tensor) -> Any:
        if launch.logits.vocab_start_index > 0:
            x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return original(launch, x)

    monkeypatch.setattr(launching.TileLaunch, "output", elsewhere)
    options: dict[str, Any] = {"schedule": "cached", **SOME}
    compare(op(problem(), **options), problem(), Upstream(0.7), **options)
    cut(monkeypatch, tiles=4, sums=3)
    with poisoned_memory(), pytest.raises(AssertionError, match="dhidden: "):
        compare(op(problem(), **options), problem(), Upstream(0.7), **options)


# --- where to cut


def shape(T: int, V: int, dtype: torch.dtype = torch.bfloat16) -> ShardLogits:
    """Logits of which only the shape is real."""
    return ShardLogits(
        hidden=torch.empty(1, 1, dtype=dtype).expand(T, 4096),
        weight=torch.empty(1, 1, dtype=dtype).expand(V, 4096),
        bias=None,
        labels=torch.empty(1, dtype=torch.int64).expand(T),
        vocab_start_index=0,
        ignore_index=-100,
        logit_scale=1.0,
        softcap=None,
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """132 programs, tiles of 128 tokens x 256 columns."""
    monkeypatch.setattr(tuning, "device_arch", lambda device: ("sm_90", 132))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("T", "V", "sums", "tiles"),
    [
        (8192, 128256, 1, 264),  # 64 blocks of tokens: 33 tiles of columns are 16 waves
        (8192, 128256, 2, 165),
        (8192, 128256, 3, 132),
        (8192, 69632, 1, 272),  # as many tiles as the limit allows: not cut
        (8192, 69633, 1, 264),
        (8192, 4096, 1, 16),  # all of it
        (16384, 262144, 1, 132),  # 128 blocks
        (65536, 262144, 1, 33),
        (131072, 262144, 1, 17),  # 33 would pass the limit: waves are not whole
        (4224, 262144, 1, 524),  # 33 blocks: 4 tiles are a wave
        (128, 262144, 1, 1024),
        (1, 262144, 3, 1024),
        (1 << 20, 128256, 1, 2),
        (1 << 23, 128256, 3, 1),  # one tile, though it passes the limit
    ],
)
def test_columns_of_a_segment(T: int, V: int, sums: int, tiles: int) -> None:
    assert segment_columns(shape(T, V), sums) == Segment(256 * tiles, tiles, 1 + sums)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("T", "sums", "tiles"), [(8192, 1, 132), (8192, 2, 66), (65536, 1, 17)])
def test_columns_of_a_segment_with_small_groups(T: int, sums: int, tiles: int) -> None:
    """A tile has a maximum and 8 groups."""
    logits = replace(shape(T, 128256), group_v=32)
    assert segment_columns(logits, sums) == Segment(256 * tiles, tiles, 1 + 8 * sums)


@given(st.integers(1, 1 << 17), st.integers(1, 300_000), st.integers(1, 3), st.integers(1, 160))
def test_segments_are_within_the_limit_and_of_whole_waves(
    T: int, V: int, sums: int, programs: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "device_arch", lambda device: ("sm_90", programs))
        columns, num_v, rows = segment_columns(shape(T, V), sums)
        config = launching.tile_launch(shape(T, 1), pointers=True).config
    assert columns == num_v * config.BLOCK_V
    assert rows == 1 + sums
    assert num_v >= 1
    assert num_v == 1 or 4 * rows * T * num_v <= launching.MAX_PART_BYTES
    blocks = -(-T // config.BLOCK_T)
    if columns < V:
        candidates = range(1, -(-V // config.BLOCK_V))
        fit = [n for n in candidates if n == 1 or 4 * rows * T * n <= launching.MAX_PART_BYTES]
        whole = [n for n in fit if n * blocks % programs == 0]
        assert num_v == max(whole or fit)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("T", [1, 64, 65, 128, 129, 8192])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_tile_that_is_cached_is_as_wide_as_one_that_is_not(
    arch: str, itemsize: int, T: int
) -> None:
    """A segment is cut into tiles before it is known whether the cache reaches it."""
    plain, stores = (tuning.tile_config(arch, itemsize, T, stores) for stores in (False, True))
    assert plain.BLOCK_V == stores.BLOCK_V
