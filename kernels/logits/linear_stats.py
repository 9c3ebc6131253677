"""Statistics of one vocabulary shard: maxima, and sums of exponentials, over its columns.

T = tokens, V = vocabulary rows here, H = hidden size.

One GEMM, ``hidden @ weight.T``, in a persistent grid. Its epilogue turns each tile of logits into
exponentials relative to the token's ``first_reference`` (``formulas.py``), reduces them
to a maximum of the tile and to sums of groups of its columns, and stores them where there is a
cache. Each tile writes partial statistics of its own: there are no atomics. ``merge_stats`` adds
them up exactly, so the result is bitwise the same however columns are cut into shards, windows and
tiles at multiples of ``group_v``, which ``tp_invariant`` fixes. A large vocabulary is processed in
segments of columns, one launch each, so that partial statistics stay within 17 MiB, with sums of
small groups 40; a segment has a column of tiles at least, whose statistics of a million tokens are
up to 100 MiB.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.logits.exact_sums import group_sums
from flce_dist.kernels.logits.launching import segment_columns, tile_launch
from flce_dist.kernels.logits.merge_stats import merge_stats
from flce_dist.kernels.logits.named_columns import named_column, named_tiles, take_out
from flce_dist.kernels.logits.operands import ColumnCache, ShardLogits
from flce_dist.kernels.logits.target import Target
from flce_dist.kernels.logits.tile import (
    inverse_temperatures,
    label_columns,
    logits_tile,
    other_columns,
)
from flce_dist.kernels.primitives import (
    computed,
    exp,
    first_reference,
    softcap_slope,
    store_tile,
    tile_coordinates,
    times_exponent,
)


@triton.jit
def _store_sums(sums_ptr, x, pid_v, T, offs_t, mask_t, counted, GROUP_V: tl.constexpr):
    """Store the sums of this tile's groups of columns into their rows of [groups, T]; 0 if ignored.

    A tile that is one group needs no reshape, whose layout conversions cost 3 % of the GEMM at
    H = 4096.
    """
    if x.shape[1] == GROUP_V:
        row = pid_v.to(tl.int64) * T + offs_t
        tl.store(sums_ptr + row, tl.where(counted, tl.sum(x, axis=1), 0.0), mask=mask_t)
    else:
        groups: tl.constexpr = x.shape[1] // GROUP_V
        rows = (pid_v * groups + tl.arange(0, groups)).to(tl.int64)
        sums = tl.where(counted[:, None], group_sums(x, GROUP_V), 0.0)
        ptrs = sums_ptr + rows[None, :] * T + offs_t[:, None]
        tl.store(ptrs, sums, mask=mask_t[:, None])


@triton.jit
def _moved_on(pid_v, pid_t, num_v, GROUP_T: tl.constexpr):
    """The column of tiles at which a group of token blocks begins further on than the one before.

    Tiles of frequent ids are slow. Left alone, a program may get those of one column in every
    group; so a group's columns begin as many further on as makes a column's program move by 7
    places each time, which visits all programs where 7 does not divide their number.
    """
    step = num_v + 7 * (tl.num_programs(0) - 1)  # num_v - 7, but never negative
    ahead = step * (pid_t // GROUP_T * GROUP_T) % tl.num_programs(0)
    return (pid_v + ahead // GROUP_T) % num_v


@triton.jit
def _without_named(
    x, in_tile, most, ids_ptr, end_ptr, z_ptr, offs_t, mask_t, vocab_start_index, start_v, V
):
    """x [BLOCK_T, BLOCK_V], but -inf at named ids, whose x go to z_ptr.

    ``in_tile`` and ``most`` are from ``named_tiles``: each token's first two entries in the tile,
    and the most of any.
    """
    first = (in_tile >> 32) & 0xFFFF
    second = (in_tile >> 48) & 0xFFFF
    n = in_tile & 0xFFFFFFFF
    first_id = vocab_start_index + start_v
    x = take_out(x, first.to(tl.int32), second.to(tl.int32), z_ptr + n)
    for _ in range(2, most, 2):  # one latency of loads for two
        n += 2
        end = tl.load(end_ptr + offs_t, mask=mask_t, other=0)
        third = named_column(ids_ptr, n, end, first_id, V - start_v)
        fourth = named_column(ids_ptr, n + 1, end, first_id, V - start_v)
        x = take_out(x, third, fourth, z_ptr + n)
    return x


@triton.jit(do_not_specialize=["T"])
def _linear_stats_kernel(
    hidden, weight, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 (global ids)
    label_logit_ptr,  # in:  [T] fp32
    part_ptr,  # out: [num_v * (1 + sums * groups), T] fp32: tiles' maxima, then groups' sums
    cache,  # out: [T, cached_v]; like hidden and weight a descriptor if TMA, else a pointer
    T, V, H,
    strides, cache_sizes,  # the tuples are those of ShardLogits; cached_v and the stride by t
    vocab_start_index, scalars,
    named,  # None, or [N] and [T] int64 (ids, ends), out: [N] fp32, and in: two of ``named_tiles``
    WITH_ENTROPY: tl.constexpr, WITH_SUM_Z: tl.constexpr, EVEN_V: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
    GROUP_V: tl.constexpr,
):  # fmt: skip
    """A program computes every num_programs-th tile of logits, and reduces it over its columns."""
    ignore_index = scalars.ignore_index
    softcap = scalars.softcap
    cached_v, stride_cache_t = cache_sizes
    FLATTEN: tl.constexpr = named is None  # a loop in the epilogue forbids it
    if named is not None:
        ids_ptr, end_ptr, z_ptr, tiles_ptr, most_ptr = named
    num_t = tl.cdiv(computed(scalars.n_counted, T), BLOCK_T)
    num_v = tl.cdiv(V, BLOCK_V)
    plane = tl.cast(num_v, tl.int64) * (BLOCK_V // GROUP_V) * T
    for tile in tl.range(tl.program_id(0), num_t * num_v, tl.num_programs(0), flatten=FLATTEN):
        pid_t, pid_v = tile_coordinates(tile, num_t, num_v, GROUP_T)
        if named is not None:
            pid_v = _moved_on(pid_v, pid_t, num_v, GROUP_T)
        start_t = pid_t * BLOCK_T
        start_v = pid_v * BLOCK_V
        offs_t = start_t + tl.arange(0, BLOCK_T)
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask_t = offs_t < T
        # Loaded before the GEMM, which hides their latency.
        column, counted = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
        label_logit = tl.load(label_logit_ptr + offs_t, mask=mask_t, other=0.0)
        reference = first_reference(label_logit)
        if named is not None:
            in_tile = tl.load(tiles_ptr + pid_v.to(tl.int64) * T + offs_t, mask=mask_t, other=-1)
            most = tl.load(most_ptr + pid_v * tl.cdiv(T, BLOCK_T) + pid_t)
        z = logits_tile(
            hidden, weight, bias_ptr, start_t, start_v, T, V, H,
            strides, scalars, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip

        z_above = z - reference[:, None]
        if named is None:
            x = other_columns(z_above, column, offs_v, V, EVEN_V)
        else:  # the label is one of them
            x = z
            if not EVEN_V:
                x += tl.where(offs_v < V, 0.0, -float("inf"))[None, :]
            x = _without_named(
                x, in_tile, most, ids_ptr, end_ptr, z_ptr, offs_t, mask_t, vocab_start_index,
                start_v, V,
            )  # fmt: skip
            x -= reference[:, None]
        if cache is not None:
            x = tl.where(counted[:, None], x, -float("inf"))  # ignored rows may hold NaN
        e = exp(x)
        row_max = tl.where(counted, tl.max(x, axis=1) + reference, -float("inf"))
        tl.store(part_ptr + pid_v.to(tl.int64) * T + offs_t, row_max, mask=mask_t)
        sums_ptr = part_ptr + tl.cast(num_v, tl.int64) * T
        _store_sums(sums_ptr, e, pid_v, T, offs_t, mask_t, counted, GROUP_V)
        if WITH_ENTROPY:
            ex = times_exponent(e, x)
            _store_sums(sums_ptr + plane, ex, pid_v, T, offs_t, mask_t, counted, GROUP_V)
        if WITH_SUM_Z:
            # Not of x: a bias of -inf makes this sum -inf, an excluded column does not.
            is_other = (offs_v[None, :] != column[:, None]) & (offs_v < V)[None, :]
            z_above = tl.where(is_other, z_above, 0.0)
            sums_ptr += (1 + WITH_ENTROPY) * plane
            _store_sums(sums_ptr, z_above, pid_v, T, offs_t, mask_t, counted, GROUP_V)
        if cache is not None:
            if softcap is not None:
                inverse = inverse_temperatures(scalars, offs_t, mask_t)
                e = tl.where(counted[:, None], e * softcap_slope(z, softcap, inverse), 0.0)
            # Tiles beyond cached_v store nothing; a branch around it would forbid flatten=True.
            store_tile(
                cache, e, start_t, start_v, T, cached_v, stride_cache_t, BLOCK_T, BLOCK_V, TMA
            )


def linear_stats(
    logits: ShardLogits, label_logit: Tensor, target: Target, *,
    cache: ColumnCache, others_max: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Write this shard's ``others_max`` [T] fp32 and ``sums`` [rows, T] fp64 (``new_sums``).

    Both are over the columns that ``target`` does not leave out: the largest logit, and the sums
    that it asks for, with ``x = z - first_reference``. ``exp(x)`` may overflow to inf: ``rescue``
    replaces such sums afterwards. label_logit [T] fp32 is summed over ranks. ``cache`` receives
    ``exp(x) * softcap'(z)`` of its columns, 0 at labels and named ids and in ignored rows. Maxima
    and sums of ``target.tiles`` are -inf and 0 where ignored.
    """
    T = logits.T
    V = logits.V
    tiles = target.tiles
    if T == 0 or V == 0:
        others_max.fill_(-torch.inf)
        sums.zero_()
        return
    segment = segment_columns(logits, 1 + target.with_entropy + target.with_sum_z)
    sizes = segment.num_v, segment.part_rows
    if tiles is not None and tiles.is_contiguous() and sizes == (tiles.shape[1], 2):
        part = tiles
    else:
        part = label_logit.new_empty(segment.part_rows * T * segment.num_v)
    for start, end, window in cache.split(V, segment.columns, segment.columns):
        here = logits.columns(start, end)
        launch = tile_launch(here, window)
        BLOCK_T = launch.config.BLOCK_T
        BLOCK_V = launch.config.BLOCK_V
        named = None
        if target.named is not None:
            tiles_of_named = named_tiles(here, target.named, launch.num_v, BLOCK_T, BLOCK_V)
            named = (target.named.ids, target.named.end, target.named.z, *tiles_of_named)
        _linear_stats_kernel[launch.grid](
            *launch.operands(here), logits.labels,
            label_logit,
            part,
            None if window is None else launch.output(window),
            T, end - start, logits.H,
            here.strides, (0, 0) if window is None else (window.shape[1], window.stride(0)),
            here.vocab_start_index, here.scalars,
            named,
            WITH_ENTROPY=target.with_entropy, WITH_SUM_Z=target.with_sum_z,
            EVEN_V=(end - start) % BLOCK_V == 0, GROUP_V=launch.group_v, **launch.constexprs,
        )  # fmt: skip
        if tiles is not None and part is not tiles:
            # Copied, for the next segment overwrites part.
            first = start // BLOCK_V
            last = -(-end // BLOCK_V)
            tiles[:, first:last] = part[: 2 * launch.num_v * T].view(2, launch.num_v, T)
        merge_stats(
            part, label_logit, launch, target,
            n_counted=logits.n_counted, first=start == 0, others_max=others_max, sums=sums,
        )  # fmt: skip
