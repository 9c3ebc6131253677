"""Which columns a launch of the statistics kernel computes, and with which tile."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flce_dist.kernels import launching, tuning
from flce_dist.kernels.launching import segment_columns
from flce_dist.kernels.shard_logits import ShardLogits


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
