"""Statistics of one vocabulary shard.

T = tokens, V = vocabulary rows here, H = hidden size.

One product ``hidden @ weight.T`` in a persistent grid; its epilogue turns each tile of logits into
exponentials relative to the token's label, takes their maximum over the other columns and their sum
over groups of these, and stores them where a cache wants them. Each tile writes rows of partial
statistics of its own, so there are no atomics. Their sums are exact (``exact_sums``), so that they
are bitwise equal however columns are cut into shards, windows and tiles. Long vocabularies are
walked in segments of whole waves, whose partial statistics stay within 40 MiB however large T and V
are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.column_cache import ColumnCache
from flce_dist.kernels.exact_sums import (
    group_sums,
    load_limbs,
    lower_limbs,
    slice_sums,
    store_limbs,
    sum_z_slice,
    top_bin,
)
from flce_dist.kernels.launching import segment_columns, tile_launch
from flce_dist.kernels.primitives import (
    exp,
    first_reference,
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
def times_exponent(e, x):
    """``e * x``, but 0 in the excluded columns: there x is -inf, and 0 * -inf NaN."""
    return tl.where(x == -float("inf"), 0.0, e * x)


@triton.jit
def store_sums(sums_ptr, x, pid_v, T, offs_t, mask_t, counted, GROUP_V: tl.constexpr):
    """Store the sums of this tile's groups of columns into their rows of [groups, T]; 0 if ignored.

    A tile that is one group takes the plain way: the other one's changes of layout cost 3 % of the
    product at H = 4096.
    """
    if x.shape[1] == GROUP_V:
        row = pid_v.to(tl.int64) * T + offs_t
        tl.store(sums_ptr + row, tl.where(counted, tl.sum(x, axis=1), 0.0), mask=mask_t)
    else:
        groups: tl.constexpr = x.shape[1] // GROUP_V
        rows = (pid_v * groups + tl.arange(0, groups)).to(tl.int64)
        sums = tl.where(counted[:, None], group_sums(x, GROUP_V), 0.0)
        cells = sums_ptr + rows[None, :] * T + offs_t[:, None]
        tl.store(cells, sums, mask=mask_t[:, None])


@triton.jit
def _linear_stats_kernel(
    hidden, weight, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 (global ids)
    label_logit_ptr,  # in:  [T] fp32
    part_ptr,  # out: [num_v * (1 + sums * groups), T] fp32: each tile's max, then groups' sums
    cache,  # out: [T, cached_v]
    T, V, H, cached_v,
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h, stride_cache_t,
    vocab_start_index, ignore_index, logit_scale, softcap,
    WITH_ENTROPY: tl.constexpr, WITH_SUM_Z: tl.constexpr, HAS_CACHE: tl.constexpr,
    EVEN_V: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
    GROUP_V: tl.constexpr,
):  # fmt: skip
    num_t, num_v = tl.cdiv(T, BLOCK_T), tl.cdiv(V, BLOCK_V)
    plane = tl.cast(num_v, tl.int64) * (BLOCK_V // GROUP_V) * T
    for tile in tl.range(tl.program_id(0), num_t * num_v, tl.num_programs(0), flatten=True):
        pid_t, pid_v = tile_coordinates(tile, num_t, num_v, GROUP_T)
        start_t, start_v = pid_t * BLOCK_T, pid_v * BLOCK_V
        offs_t = start_t + tl.arange(0, BLOCK_T)
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask_t = offs_t < T
        # Before the product, which hides how long they take.
        column, counted = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
        label_logit = tl.load(label_logit_ptr + offs_t, mask=mask_t, other=0.0)
        reference = first_reference(label_logit)
        z = logits_tile(
            hidden, weight, bias_ptr, start_t, start_v, T, V, H,
            stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h,
            logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip

        z_above = z - reference[:, None]
        x = other_columns(z_above, column, offs_v, V, EVEN_V)
        if HAS_CACHE:
            x = tl.where(counted[:, None], x, -float("inf"))  # ignored rows may hold NaN
        e = exp(x)
        row_max = tl.where(counted, tl.max(x, axis=1) + reference, -float("inf"))
        tl.store(part_ptr + pid_v.to(tl.int64) * T + offs_t, row_max, mask=mask_t)
        sums_ptr = part_ptr + tl.cast(num_v, tl.int64) * T
        store_sums(sums_ptr, e, pid_v, T, offs_t, mask_t, counted, GROUP_V)
        if WITH_ENTROPY:
            ex = times_exponent(e, x)
            store_sums(sums_ptr + plane, ex, pid_v, T, offs_t, mask_t, counted, GROUP_V)
        if WITH_SUM_Z:
            # Not of x: a bias of -inf makes this sum -inf, an excluded column does not.
            other = (offs_v[None, :] != column[:, None]) & (offs_v < V)[None, :]
            z_above = tl.where(other, z_above, 0.0)
            sums_ptr += (1 + WITH_ENTROPY) * plane
            store_sums(sums_ptr, z_above, pid_v, T, offs_t, mask_t, counted, GROUP_V)
        if HAS_CACHE:
            if HAS_SOFTCAP:
                e = tl.where(counted[:, None], e * softcap_slope(z, softcap), 0.0)
            # Tiles beyond cached_v store nothing; a branch around it would forbid flatten=True.
            store_tile(
                cache, e, start_t, start_v, T, cached_v, stride_cache_t, BLOCK_T, BLOCK_V, TMA
            )


@triton.jit
def _merge_limbs(
    part_ptr, sums_ptr, N, T, stride_sums, offs_t, mask_t, bin, risen,
    HEADROOM: tl.constexpr, LIMBS: tl.constexpr, FIRST: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add [N, T] terms to the limbs of a sum, whose top bin has risen to ``bin``."""
    high = tl.zeros(bin.shape, tl.float64)
    middle, low = high, high
    if not FIRST:
        high, middle, low = load_limbs(sums_ptr, stride_sums, offs_t, mask_t, LIMBS)
        high, middle, low = lower_limbs(high, middle, low, risen, LIMBS)
    for start in range(0, N, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        mask = (n < N) & mask_t[None, :]
        terms = tl.load(part_ptr + n * T + offs_t[None, :], mask=mask, other=0.0)
        more_high, more_middle, more_low = slice_sums(terms, bin, HEADROOM, LIMBS)
        high += more_high
        middle += more_middle
        low += more_low
    store_limbs(sums_ptr, stride_sums, offs_t, mask_t, high, middle, low, LIMBS)


@triton.jit
def _merge_kernel(
    part_ptr, label_logit_ptr,  # in:  as _linear_stats_kernel writes it, [T] fp32
    max_ptr, sums_ptr,  # in, out: [T] fp32, [rows, T] fp64
    num_v, T, stride_sums,
    WITH_ENTROPY: tl.constexpr, WITH_SUM_Z: tl.constexpr, FIRST: tl.constexpr,
    HEADROOM: tl.constexpr, ENTROPY_HEADROOM: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < T
    reference = first_reference(tl.load(label_logit_ptr + offs_t, mask=mask_t, other=0.0))
    row_max = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    if not FIRST:
        row_max = tl.load(max_ptr + offs_t, mask=mask_t, other=0.0)
    bin_before = top_bin(row_max, reference)
    for start in range(0, num_v, BLOCK_N):
        n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        mask = (n < num_v) & mask_t[None, :]
        part = tl.load(part_ptr + n * T + offs_t[None, :], mask=mask, other=-float("inf"))
        row_max = tl.maximum(row_max, tl.max(part, axis=0))
    tl.store(max_ptr + offs_t, row_max, mask=mask_t)

    bin = top_bin(row_max, reference)
    risen = bin - bin_before
    N = num_v * GROUPS
    part_ptr += tl.cast(num_v, tl.int64) * T
    plane = tl.cast(N, tl.int64) * T
    _merge_limbs(
        part_ptr, sums_ptr, N, T, stride_sums, offs_t, mask_t, bin, risen,
        HEADROOM, 2, FIRST, BLOCK_N,
    )  # fmt: skip
    sums_ptr += 2 * stride_sums
    part_ptr += plane
    if WITH_ENTROPY:
        _merge_limbs(
            part_ptr, sums_ptr, N, T, stride_sums, offs_t, mask_t, bin, risen,
            ENTROPY_HEADROOM, 3, FIRST, BLOCK_N,
        )  # fmt: skip
        sums_ptr += 3 * stride_sums
        part_ptr += plane
    if WITH_SUM_Z:
        sum_z = tl.zeros((BLOCK_T,), tl.float64)
        if not FIRST:
            sum_z = tl.load(sums_ptr + offs_t, mask=mask_t, other=0.0)
        for start in range(0, N, BLOCK_N):
            n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
            mask = (n < N) & mask_t[None, :]
            terms = tl.load(part_ptr + n * T + offs_t[None, :], mask=mask, other=0.0)
            sum_z += tl.sum(sum_z_slice(terms), axis=0)
        tl.store(sums_ptr + offs_t, sum_z, mask=mask_t)
        sums_ptr += stride_sums
    tl.store(sums_ptr + offs_t, bin.to(tl.float64), mask=mask_t)


def new_sums(logits: ShardLogits, *, with_sum_z: bool, with_entropy: bool) -> Tensor:
    """Return memory [rows, T] fp64 for the sums of ``linear_stats``."""
    rows = 2 + 3 * with_entropy + with_sum_z + 1
    return logits.hidden.new_empty(rows, logits.T, dtype=torch.float64)


def linear_stats(
    logits: ShardLogits,
    label_logit: Tensor,
    *,
    cache: ColumnCache,
    with_sum_z: bool,
    with_entropy: bool,
    others_max: Tensor,
    sums: Tensor,
) -> None:
    """Write this shard's ``others_max`` [T] fp32 and ``sums`` [rows, T] fp64.

    Over the columns other than the label: sums of ``exp(x)`` with ``x = z - first_reference``; with
    entropy also of ``exp(x) * x``; with sum_z also of ``x``. Rows of sums are limbs
    (``exact_sums``): 2 of the first sum, 3 of the second, the third itself, and last the number of
    the top bin, all of which only ``rescue`` and ``token_loss`` understand. ``exp(x)`` may
    overflow to inf: ``rescue`` comes after. The columns that cache has store
    ``exp(x) * softcap'(z)`` there, 0 at labels and in ignored rows.
    """
    T, V = logits.T, logits.V
    if T == 0 or V == 0:
        others_max.fill_(-torch.inf)
        sums.zero_()
        return
    segment = segment_columns(logits, 1 + with_entropy + with_sum_z)
    # Tokens of a merging program: 32 bytes of a row of partial statistics at least, 128 at most.
    tokens = triton.next_power_of_2(T)
    block_t = min(tokens, 32, max(8, tokens // 256))
    part = label_logit.new_empty(segment.part_rows * T * segment.num_v)
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
            GROUP_V=launch.group_v,
            **launch.constexprs(),
        )  # fmt: skip
        groups = launch.config.BLOCK_V // launch.group_v
        cells = 2048 if with_entropy else 4096  # what the registers of 4 warps hold
        block_n = min(cells // block_t, triton.next_power_of_2(launch.num_v * groups))
        _merge_kernel[(-(-T // block_t),)](
            part, label_logit,
            others_max, sums,
            launch.num_v, T, sums.stride(0),
            WITH_ENTROPY=with_entropy,
            WITH_SUM_Z=with_sum_z,
            FIRST=start == 0,
            GROUPS=groups,
            **launch.headrooms(),
            BLOCK_N=block_n, BLOCK_T=block_t, num_warps=4,
        )  # fmt: skip
