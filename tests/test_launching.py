"""Which columns a launch of the statistics kernel computes, and with which tile.

T tokens, V vocabulary rows.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flce_dist.kernels import launching, tuning
from flce_dist.kernels.launching import Segment, segment_columns
from flce_dist.kernels.shard_logits import ShardLogits


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
