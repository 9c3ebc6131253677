"""Statistics of one vocabulary shard, and the rescue of rows that overflow.

T = tokens, V = vocabulary rows here, H = hidden size.

One product ``hidden @ weight.T`` in a persistent grid; its epilogue turns each tile of logits into
exponentials relative to the token's reference, sums them over the columns other than the label,
and stores them where a cache wants them. Each tile writes its own row of partial statistics
[num_v, T], so there are no atomics and equal runs are bitwise equal.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.launching import stats_buffer, tile_launch
from flce_dist.kernels.primitives import (
    cast,
    exp,
    label_columns,
    logits_tile,
    store_tile,
    tile_coordinates,
)
from flce_dist.kernels.shard_logits import ShardLogits


@triton.jit
def _other_exponentials(
    z, reference, column, counted, offs_v, V, softcap,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """``(z_other, x, e, de)`` [BLOCK_T, BLOCK_V]: logits but -inf at the label and beyond V,
    z_other - reference, exp(x) and its derivative by the uncapped logit. In ignored rows z_other
    and x hold anything, e and de are 0.

    Every operation here costs 0.4 % of a tile at H = 4096: the exclusions are one select and one
    addition per element, and -inf does the rest.
    """
    z_other = tl.where(offs_v[None, :] == column[:, None], -float("inf"), z)
    z_other += tl.where(offs_v < V, 0.0, -float("inf"))[None, :]
    x = z_other - reference[:, None]
    e = tl.where(counted[:, None], exp(x), 0.0)
    de = e
    if HAS_SOFTCAP:
        capped = z / softcap
        de = tl.where(counted[:, None], e * (1 - capped * capped), 0.0)
    return z_other, x, e, de


@triton.jit
def _row_sum_ex(e, x, counted):
    """Row sums of ``e * x``, 0 where e is: at excluded columns x is -inf, and 0 * -inf NaN."""
    return tl.sum(tl.where((x == -float("inf")) | ~counted[:, None], 0.0, e * x), axis=1)


@triton.jit
def _row_sum_x(x, column, counted, offs_v, V):
    """Row sums of x without the excluded columns. A bias of -inf makes them -inf."""
    other = (offs_v[None, :] != column[:, None]) & (offs_v < V)[None, :] & counted[:, None]
    return tl.sum(tl.where(other, x, 0.0), axis=1)


@triton.jit
def _linear_stats_kernel(
    hidden, weight, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 (global ids)
    label_logit_ptr,  # in:  [T] fp32
    max_ptr, sums_ptr,  # out: [num_v, T], [WITH_ENTROPY + WITH_SUM_Z + 1, num_v, T] fp32
    cache,  # out: [T, cached_v]
    T, V, H, cached_v,
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h, stride_cache_t,
    vocab_start_index, ignore_index, logit_scale, softcap,
    WITH_ENTROPY: tl.constexpr, WITH_SUM_Z: tl.constexpr, HAS_CACHE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
):  # fmt: skip
    num_t, num_v = tl.cdiv(T, BLOCK_T), tl.cdiv(V, BLOCK_V)
    plane = num_v.to(tl.int64) * T
    for tile in tl.range(tl.program_id(0), num_t * num_v, tl.num_programs(0), flatten=True):
        pid_t, pid_v = tile_coordinates(tile, num_t, num_v, GROUP_T)
        start_t, start_v = pid_t * BLOCK_T, pid_v * BLOCK_V
        z = logits_tile(
            hidden, weight, bias_ptr, start_t, start_v, T, V, H,
            stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h,
            logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip

        offs_t = start_t + tl.arange(0, BLOCK_T)
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask_t = offs_t < T
        column, counted = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
        reference = tl.load(label_logit_ptr + offs_t, mask=mask_t, other=0.0)
        z_other, x, e, de = _other_exponentials(
            z, reference, column, counted, offs_v, V, softcap, HAS_SOFTCAP
        )
        row = pid_v.to(tl.int64) * T + offs_t
        row_max = tl.where(counted, tl.max(z_other, axis=1), -float("inf"))
        tl.store(max_ptr + row, row_max, mask=mask_t)
        tl.store(sums_ptr + row, tl.sum(e, axis=1), mask=mask_t)
        if WITH_ENTROPY:
            tl.store(sums_ptr + plane + row, _row_sum_ex(e, x, counted), mask=mask_t)
        if WITH_SUM_Z:
            sum_x = _row_sum_x(x, column, counted, offs_v, V)
            tl.store(sums_ptr + (1 + WITH_ENTROPY) * plane + row, sum_x, mask=mask_t)
        if HAS_CACHE:
            # Tiles beyond cached_v store nothing; a branch around it would forbid flatten=True.
            store_tile(
                cache, de, start_t, start_v, T, cached_v, stride_cache_t, BLOCK_T, BLOCK_V, TMA
            )


@triton.jit
def _rescue_kernel(
    hidden, weight, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 (global ids)
    label_logit_ptr, reference_ptr, flagged_ptr,  # in:  [T] fp32, [T] fp32, [1] bool
    sums_ptr,  # out: [WITH_ENTROPY + 1, num_v, T] fp32, only rows with another reference
    cache_ptr,  # out: [T, cached_v], the same rows
    T, V, H, cached_v,
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h, stride_cache_t,
    vocab_start_index, ignore_index, logit_scale, softcap,
    WITH_ENTROPY: tl.constexpr, HAS_CACHE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
):  # fmt: skip
    num_t, num_v = tl.cdiv(T, BLOCK_T), tl.cdiv(V, BLOCK_V)
    num_tiles = num_t * num_v * tl.load(flagged_ptr).to(tl.int32)  # 0: nothing to do, at once
    plane = num_v.to(tl.int64) * T
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        pid_t, pid_v = tile_coordinates(tile, num_t, num_v, GROUP_T)
        start_t, start_v = pid_t * BLOCK_T, pid_v * BLOCK_V
        offs_t = start_t + tl.arange(0, BLOCK_T)
        reference = tl.load(reference_ptr + offs_t, mask=offs_t < T, other=0.0)
        label_logit = tl.load(label_logit_ptr + offs_t, mask=offs_t < T, other=0.0)
        flagged = reference > label_logit
        if tl.max(flagged.to(tl.int32), axis=0) > 0:
            z = logits_tile(
                hidden, weight, bias_ptr, start_t, start_v, T, V, H,
                stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h,
                logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
            )  # fmt: skip
            offs_v = start_v + tl.arange(0, BLOCK_V)
            column, counted = label_columns(
                labels_ptr, offs_t, T, V, vocab_start_index, ignore_index
            )
            _, x, e, de = _other_exponentials(
                z, reference, column, counted, offs_v, V, softcap, HAS_SOFTCAP
            )
            row = pid_v.to(tl.int64) * T + offs_t
            tl.store(sums_ptr + row, tl.sum(e, axis=1), mask=flagged)
            if WITH_ENTROPY:
                sum_ex = _row_sum_ex(e, x, counted)
                tl.store(sums_ptr + plane + row, sum_ex, mask=flagged)
            if HAS_CACHE:
                # T * V passes 2**31 at 16k x 128k
                cells = offs_t.to(tl.int64)[:, None] * stride_cache_t + offs_v[None, :]
                mask = flagged[:, None] & (offs_v < cached_v)[None, :]
                tl.store(cache_ptr + cells, cast(de, cache_ptr.dtype.element_ty), mask=mask)


def linear_stats(
    logits: ShardLogits,
    label_logit: Tensor,
    *,
    cache: Tensor | None,
    with_sum_z: bool,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return this shard's ``(others_max [T], partial sums [k, num_v, T])``, fp32.

    Over the columns other than the label: sums of ``exp(x)`` with ``x = z - label_logit``; with
    entropy also of ``exp(x) * x``; with sum_z also of ``x``, in that order. ``exp(x)`` may
    overflow to inf: ``rescue`` comes after. The leading ``cache.shape[1]`` columns store
    ``exp(x) * softcap'(z)`` in cache, 0 at labels and in ignored rows.
    """
    T, V = logits.T, logits.V
    k = 1 + with_entropy + with_sum_z
    if T == 0 or V == 0:
        return label_logit.new_full((T,), -float("inf")), label_logit.new_zeros(k, 1, T)
    launch = tile_launch(logits, cache)
    others_max = stats_buffer(logits, 1, launch.num_v)
    sums = stats_buffer(logits, k, launch.num_v)
    config = launch.config
    _linear_stats_kernel[launch.grid](
        *launch.operands(), logits.labels,
        label_logit,
        others_max, sums,
        None if cache is None else launch.matrix(cache, config.BLOCK_T, config.BLOCK_V),
        T, V, logits.H, 0 if cache is None else cache.shape[1],
        *launch.strides(), 0 if cache is None else cache.stride(0),
        logits.vocab_start_index, logits.ignore_index, logits.logit_scale, logits.softcap or 1.0,
        WITH_ENTROPY=with_entropy,
        WITH_SUM_Z=with_sum_z,
        HAS_CACHE=cache is not None,
        **launch.constexprs(),
    )  # fmt: skip
    return others_max[0].amax(0), sums


def rescue(
    logits: ShardLogits,
    label_logit: Tensor,
    reference: Tensor,
    partial_sums: Tensor,
    *,
    cache: Tensor | None,
    with_entropy: bool,
) -> Tensor:
    """Return the sums [k, T] of ``linear_stats``, relative to ``reference``.

    Rows whose reference is not their label's logit are computed again, and their row of the cache
    with them; the sum of ``z - label_logit`` does not depend on the reference and stays. The
    launch is unconditional and every program exits at once where there is no such row, so the host
    need not know.
    """
    T, V = logits.T, logits.V
    if T == 0 or V == 0:
        return partial_sums.sum(1)
    launch = tile_launch(logits)
    flagged = (reference != label_logit).any()
    _rescue_kernel[launch.grid](
        *launch.operands(), logits.labels,
        label_logit, reference, flagged,
        partial_sums,
        cache,
        T, V, logits.H, 0 if cache is None else cache.shape[1],
        *launch.strides(), 0 if cache is None else cache.stride(0),
        logits.vocab_start_index, logits.ignore_index, logits.logit_scale, logits.softcap or 1.0,
        WITH_ENTROPY=with_entropy,
        HAS_CACHE=cache is not None,
        **launch.constexprs(),
    )  # fmt: skip
    return partial_sums.sum(1)
