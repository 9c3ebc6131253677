"""Statistics of one vocabulary shard.

T = tokens, V = vocabulary rows here, H = hidden size.

One product ``hidden @ weight.T`` in a persistent grid; its epilogue turns each tile of logits into
exponentials relative to the token's label, takes their sum and maximum over the other columns, and
stores them where a cache wants them. Each tile writes its own row of partial statistics, so there
are no atomics and equal runs are bitwise equal. Long vocabularies are walked in segments of whole
waves, whose partial statistics stay within a few MiB however large T and V are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.column_cache import ColumnCache
from flce_dist.kernels.launching import segment_columns, tile_launch
from flce_dist.kernels.primitives import (
    exp,
    label_columns,
    logits_tile,
    softcap_slope,
    store_tile,
    tile_coordinates,
)
from flce_dist.kernels.shard_logits import ShardLogits


@triton.jit
def other_columns(x, column, offs_v, V, EVEN_V: tl.constexpr):
    """x [BLOCK_T, BLOCK_V], but -inf at labels and beyond V.

    A comparison, a select and (where V is not whole tiles) an addition per element: each operation
    of the epilogue costs about 0.4 % of a tile at H = 4096.
    """
    x = tl.where(offs_v[None, :] == column[:, None], -float("inf"), x)
    if not EVEN_V:
        x += tl.where(offs_v < V, 0.0, -float("inf"))[None, :]
    return x


@triton.jit
def row_sum_ex(e, x):
    """Row sums of ``e * x``, without the excluded columns: there x is -inf, and 0 * -inf NaN."""
    return tl.sum(tl.where(x == -float("inf"), 0.0, e * x), axis=1)


@triton.jit
def _linear_stats_kernel(
    hidden, weight, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 (global ids)
    label_logit_ptr,  # in:  [T] fp32
    part_ptr,  # out: [2 + WITH_ENTROPY + WITH_SUM_Z, num_v, T] fp32: max, then sums
    cache,  # out: [T, cached_v]
    T, V, H, cached_v,
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h, stride_cache_t,
    vocab_start_index, ignore_index, logit_scale, softcap,
    WITH_ENTROPY: tl.constexpr, WITH_SUM_Z: tl.constexpr, HAS_CACHE: tl.constexpr,
    EVEN_V: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
):  # fmt: skip
    num_t, num_v = tl.cdiv(T, BLOCK_T), tl.cdiv(V, BLOCK_V)
    plane = num_v.to(tl.int64) * T
    for tile in tl.range(tl.program_id(0), num_t * num_v, tl.num_programs(0), flatten=True):
        pid_t, pid_v = tile_coordinates(tile, num_t, num_v, GROUP_T)
        start_t, start_v = pid_t * BLOCK_T, pid_v * BLOCK_V
        offs_t = start_t + tl.arange(0, BLOCK_T)
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask_t = offs_t < T
        # Before the product, which hides how long they take.
        column, counted = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
        label_logit = tl.load(label_logit_ptr + offs_t, mask=mask_t, other=0.0)
        z = logits_tile(
            hidden, weight, bias_ptr, start_t, start_v, T, V, H,
            stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h,
            logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip

        z_above = z - label_logit[:, None]
        x = other_columns(z_above, column, offs_v, V, EVEN_V)
        if HAS_CACHE:
            x = tl.where(counted[:, None], x, -float("inf"))  # ignored rows may hold NaN
        e = exp(x)
        row = part_ptr + pid_v.to(tl.int64) * T + offs_t
        row_max = tl.where(counted, tl.max(x, axis=1) + label_logit, -float("inf"))
        tl.store(row, row_max, mask=mask_t)
        tl.store(row + plane, tl.where(counted, tl.sum(e, axis=1), 0.0), mask=mask_t)
        if WITH_ENTROPY:
            sum_ex = tl.where(counted, row_sum_ex(e, x), 0.0)
            tl.store(row + 2 * plane, sum_ex, mask=mask_t)
        if WITH_SUM_Z:
            # Not of x: a bias of -inf makes this sum -inf, an excluded column does not.
            other = (offs_v[None, :] != column[:, None]) & (offs_v < V)[None, :]
            sum_z = tl.where(counted, tl.sum(tl.where(other, z_above, 0.0), axis=1), 0.0)
            tl.store(row + (2 + WITH_ENTROPY) * plane, sum_z, mask=mask_t)
        if HAS_CACHE:
            if HAS_SOFTCAP:
                e = tl.where(counted[:, None], e * softcap_slope(z, softcap), 0.0)
            # Tiles beyond cached_v store nothing; a branch around it would forbid flatten=True.
            store_tile(
                cache, e, start_t, start_v, T, cached_v, stride_cache_t, BLOCK_T, BLOCK_V, TMA
            )


@triton.jit
def _merge_kernel(
    part_ptr,  # in:  [1 + K, num_v, T] fp32: max, then sums
    max_ptr, sums_ptr,  # in, out: [T], [K, T] fp32
    num_v, T,
    K: tl.constexpr, FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < T
    row_max = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    if not FIRST:
        row_max = tl.load(max_ptr + offs_t, mask=mask_t, other=0.0)
    for start in range(0, num_v, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        mask = (n < num_v) & mask_t[None, :]
        part = tl.load(part_ptr + n * T + offs_t[None, :], mask=mask, other=-float("inf"))
        row_max = tl.maximum(row_max, tl.max(part, axis=0))
    tl.store(max_ptr + offs_t, row_max, mask=mask_t)
    for k in tl.static_range(K):
        row_sum = tl.zeros((BLOCK_T,), tl.float32)
        if not FIRST:
            row_sum = tl.load(sums_ptr + k * T + offs_t, mask=mask_t, other=0.0)
        for start in range(0, num_v, BLOCK_N):
            n = (start + tl.arange(0, BLOCK_N) + (k + 1) * num_v).to(tl.int64)[:, None]
            mask = (n < (k + 2) * num_v) & mask_t[None, :]
            part = tl.load(part_ptr + n * T + offs_t[None, :], mask=mask, other=0.0)
            row_sum += tl.sum(part, axis=0)
        tl.store(sums_ptr + k * T + offs_t, row_sum, mask=mask_t)


def linear_stats(
    logits: ShardLogits,
    label_logit: Tensor,
    *,
    cache: ColumnCache,
    with_sum_z: bool,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return this shard's ``(others_max [T], sums [k, T])``, fp32.

    Over the columns other than the label: sums of ``exp(x)`` with ``x = z - label_logit``; with
    entropy also of ``exp(x) * x``; with sum_z also of ``x``, in that order. ``exp(x)`` may
    overflow to inf: ``rescue`` comes after. The columns that cache has store
    ``exp(x) * softcap'(z)`` there, 0 at labels and in ignored rows.
    """
    T, V = logits.T, logits.V
    k = 1 + with_entropy + with_sum_z
    if T == 0 or V == 0:
        return label_logit.new_full((T,), -float("inf")), label_logit.new_zeros(k, T)
    others_max, sums = torch.empty_like(label_logit), label_logit.new_empty(k, T)
    segment = segment_columns(logits, 1 + k)
    block_t = min(32, triton.next_power_of_2(T))  # 32: 128 bytes of a row of partial statistics
    part = label_logit.new_empty((1 + k) * T * segment.num_v)
    for start, end, window in cache.walk(V, segment.columns, segment.columns):
        launch = tile_launch(logits.columns(start, end), window)
        _linear_stats_kernel[launch.grid](
            *launch.operands(), logits.labels,
            label_logit,
            part,
            None if window is None else launch.output(window),
            T, end - start, logits.H, 0 if window is None else window.shape[1],
            *launch.strides(), 0 if window is None else window.stride(0),
            logits.vocab_start_index + start, *launch.scalars(),
            WITH_ENTROPY=with_entropy,
            WITH_SUM_Z=with_sum_z,
            HAS_CACHE=window is not None,
            EVEN_V=(end - start) % launch.config.BLOCK_V == 0,
            **launch.constexprs(),
        )  # fmt: skip
        _merge_kernel[(-(-T // block_t),)](
            part,
            others_max, sums,
            launch.num_v, T,
            K=k, FIRST=start == 0, BLOCK_N=4096 // block_t, BLOCK_T=block_t,
        )  # fmt: skip
    return others_max, sums
