"""One pass over this shard's logits: statistics of groups of columns, and the best ids.

T = tokens, V = vocabulary rows here, H = hidden size, k = ids of a token, N = groups of columns.

Of one id the epilogue finds the largest logit and its column, or those of logit plus noise; of a
label the number of logits above it. For more ids it writes the logits, of a chunk of tokens at a
time, and ``winners`` reads few of them again. Memory has a bound that holds at any T.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.best.chunks import chunk_tokens
from flce_dist.kernels.best.interface import Noise, ShardBest
from flce_dist.kernels.best.keys import LOWEST_KEY, next_above
from flce_dist.kernels.best.merge_groups import merge_groups
from flce_dist.kernels.best.noise import gumbel
from flce_dist.kernels.best.winners import winners
from flce_dist.kernels.grid import Grid
from flce_dist.kernels.logits.launching import TileLaunch, matrix, tile_launch
from flce_dist.kernels.logits.operands import ShardLogits, new_window
from flce_dist.kernels.logits.tile import logits_tile
from flce_dist.kernels.primitives import exp, finite, halves, store_tile, tile_coordinates

BLOCK_COLUMNS = 64
"""Columns of a block whose largest logit tells whether its logits are read again. With the 256 of a
tile the 256 best of 8192 tokens took 16.9 ms on an H200, with 64 15.4; with 32 the maxima cost more
than they save. A shard of fewer blocks than ids has narrower ones."""

_LEAST_COLUMNS = 8


@triton.jit
def _maxima_of_groups(x, COLUMNS: tl.constexpr):
    """Return x [T, V] as groups of so many columns, and the maximum of each."""
    of_groups = tl.reshape(x, (x.shape[0], x.shape[1] // COLUMNS, COLUMNS))
    return of_groups, tl.max(of_groups, axis=2)


@triton.jit
def _store_groups(part_ptr, x, pid_v, plane, T, offs_t, mask_t, GROUP_V: tl.constexpr):
    """Store the maximum of each group of columns and its sum of ``exp(x - maximum)``."""
    if x.shape[1] == GROUP_V:
        largest = tl.max(x, axis=1)
        reference = finite(largest)
        total = tl.sum(exp(x - reference[:, None]), axis=1)
        place = part_ptr + pid_v.to(tl.int64) * T + offs_t
        mask = mask_t
    else:
        of_groups, largest = _maxima_of_groups(x, GROUP_V)
        reference = finite(largest)
        total = tl.sum(exp(of_groups - reference[:, :, None]), axis=2)
        groups: tl.constexpr = x.shape[1] // GROUP_V
        rows = (pid_v * groups + tl.arange(0, groups)).to(tl.int64)
        place = part_ptr + rows[None, :] * T + offs_t[:, None]
        mask = mask_t[:, None]
    tl.store(place, largest, mask=mask)
    tl.store(place + plane, total, mask=mask)


@triton.jit
def _store_maxima(maxima_ptr, x, pid_v, num_v, offs_t, mask_t, COLUMNS: tl.constexpr):
    """Store the maximum of each block of so many columns, all of a token side by side."""
    _, largest = _maxima_of_groups(x, COLUMNS)
    BLOCKS: tl.constexpr = x.shape[1] // COLUMNS
    maxima_ptr += offs_t.to(tl.int64)[:, None] * (num_v * BLOCKS)
    place = pid_v * BLOCKS + tl.arange(0, BLOCKS)
    tl.store(maxima_ptr + place[None, :], largest, mask=mask_t[:, None])


@triton.jit
def _store_logits(z, x, start_t, start_v, T, V, stride_t, TMA: tl.constexpr):
    """Store a tile x of logits, half of the columns at a time: shared memory holds no fp32 tile."""
    WIDTH: tl.constexpr = x.shape[1] // 2
    left, right = halves(x)
    store_tile(z, left, start_t, start_v, T, V, stride_t, x.shape[0], WIDTH, TMA)
    store_tile(z, right, start_t, start_v + WIDTH, T, V, stride_t, x.shape[0], WIDTH, TMA)


@triton.jit(do_not_specialize=["T"])
def _best_pass_kernel(
    hidden, weight, bias_ptr,  # in:  [T, H], [V, H], [V]; matrices are descriptors if TMA
    labels_ptr, label_logit_ptr,  # in:  [T] int64 (global ids) and fp32 of all ranks, or None
    part_ptr,  # out: [2 * N, T] fp32: maxima of groups, then their sums
    score_ptr, column_ptr, above_ptr,  # out: [num_v, T] fp32, int32 and int32, or None
    z, maxima_ptr,  # out: [T, V] fp32 and its blocks' maxima [T, num_blocks] fp32, or None
    T, V, H,
    strides, stride_z_t,  # the tuple is that of ShardLogits, like scalars
    vocab_start_index, scalars, noise,  # noise: None, or [] and [T] int64
    EVEN_V: tl.constexpr, ALIGNED: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
    GROUP_V: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program computes every num_programs-th tile of logits, and reduces it over its columns."""
    num_t = tl.cdiv(T, BLOCK_T)
    num_v = tl.cdiv(V, BLOCK_V)
    plane = tl.cast(num_v, tl.int64) * (BLOCK_V // GROUP_V) * T
    for tile in tl.range(tl.program_id(0), num_t * num_v, tl.num_programs(0), flatten=True):
        pid_t, pid_v = tile_coordinates(tile, num_t, num_v, GROUP_T)
        start_t = pid_t * BLOCK_T
        start_v = pid_v * BLOCK_V
        offs_t = start_t + tl.arange(0, BLOCK_T)
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask_t = offs_t < T
        if above_ptr is not None:  # loaded before the GEMM, which hides the latency
            label = tl.load(labels_ptr + offs_t, mask=mask_t, other=0) - vocab_start_index
            label_logit = tl.load(label_logit_ptr + offs_t, mask=mask_t, other=0.0)
        x = logits_tile(
            hidden, weight, bias_ptr, start_t, start_v, T, V, H,
            strides, scalars, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip
        if not EVEN_V:
            x += tl.where(offs_v < V, 0.0, -float("inf"))[None, :]
        _store_groups(part_ptr, x, pid_v, plane, T, offs_t, mask_t, GROUP_V)
        of_tile = pid_v.to(tl.int64) * T + offs_t
        if above_ptr is not None:
            # One comparison: equal logits of smaller ids come first, too.
            before = offs_v[None, :] < tl.minimum(label, V)[:, None]
            least = tl.where(before, label_logit[:, None], next_above(label_logit)[:, None])
            above = tl.sum((x >= least).to(tl.int32), axis=1)
            tl.store(above_ptr + of_tile, above, mask=mask_t)
        if score_ptr is not None:
            score = x
            if noise is not None:
                first_id = vocab_start_index + start_v
                score = x + gumbel(noise, offs_t, mask_t, first_id, offs_v - start_v, ALIGNED)
            best = tl.max(score, axis=1)
            column = tl.where(score == best[:, None], offs_v[None, :], V)
            tl.store(score_ptr + of_tile, best, mask=mask_t)
            tl.store(column_ptr + of_tile, tl.min(column, axis=1), mask=mask_t)
        if z is not None:
            _store_logits(z, x, start_t, start_v, T, V, stride_z_t, TMA)
            if maxima_ptr is not None:
                _store_maxima(maxima_ptr, x, pid_v, num_v, offs_t, mask_t, COLUMNS)


def best_of_shard(
    logits: ShardLogits, *, k: int, label_logit: Tensor | None, noise: Noise | None
) -> ShardBest:
    """Return statistics of this shard's logits, and the k best ids of each token.

    Logits rank by value, equal ones by their ids: the smaller first. ``label_logit`` [T] fp32 is of
    ``label_logits``, summed over ranks; without it nothing is counted. With ``noise`` k is 1, and
    the best id is that of the largest sum of logit and noise. Banned ids, whose logit is -inf, are
    never among the best. Results of ignored tokens mean nothing.
    """
    T = logits.T
    V = logits.V
    device = logits.hidden.device
    largest = torch.empty(T, dtype=torch.float32, device=device)
    sums = torch.empty(2, T, dtype=torch.float64, device=device)
    above = None if label_logit is None else torch.empty(T, dtype=torch.int64, device=device)
    keys = torch.empty(T, k, dtype=torch.int64, device=device) if k else None
    best = ShardBest(largest, sums, above, keys)
    if V == 0:
        largest.fill_(-torch.inf)
        sums.zero_()
        if above is not None:
            above.zero_()
        if keys is not None:
            keys.fill_(LOWEST_KEY.value)
    elif T:
        launch = _tile_launch(logits, None, noise)
        step = chunk_tokens(T, V, k, counts=above is not None, grid=grid_of(launch))
        for start in range(0, T, step):
            tokens = slice(start, min(start + step, T))
            _best_of_chunk(
                logits.tokens(tokens.start, tokens.stop), k,
                None if label_logit is None else label_logit[tokens],
                None if noise is None else Noise(noise.seed, noise.counters[tokens]),
                out=_of_tokens(best, tokens),
            )  # fmt: skip
    return best


def _of_tokens(best: ShardBest, tokens: slice) -> ShardBest:
    above = None if best.above is None else best.above[tokens]
    pairs = None if best.pairs is None else best.pairs[tokens]
    return ShardBest(best.largest[tokens], best.sums[:, tokens], above, pairs)


def _tile_launch(logits: ShardLogits, z: Tensor | None, noise: Noise | None) -> TileLaunch:
    """Choose tiles of half the columns if noise is not shared by ids: it takes registers."""
    launch = tile_launch(logits, z)
    if noise is None or _is_aligned(logits):
        return launch
    BLOCK_V = launch.config.BLOCK_V // 2
    group_v = min(launch.group_v, BLOCK_V)
    return replace(launch, config=replace(launch.config, BLOCK_V=BLOCK_V), group_v=group_v)


def grid_of(launch: TileLaunch) -> Grid:
    tile = launch.config
    groups = tile.BLOCK_V // launch.group_v
    return Grid(tile.BLOCK_T, tile.BLOCK_V, launch.programs, groups)


def _is_aligned(logits: ShardLogits) -> bool:
    return logits.vocab_start_index % 16 == 0


def _block_columns(V: int, k: int) -> int:
    """Choose the columns of a block such that there are as many blocks as ids, if they can be.

    With fewer no maximum bounds the k-th logit, and a program reads all of a row.
    """
    columns = BLOCK_COLUMNS
    while columns > _LEAST_COLUMNS and V < k * columns:
        columns //= 2
    return columns


def _best_of_chunk(
    logits: ShardLogits, k: int, label_logit: Tensor | None, noise: Noise | None, *, out: ShardBest
) -> None:  # fmt: skip
    T = logits.T
    V = logits.V
    device = logits.hidden.device
    z = new_window(T, V, torch.float32, device) if k > 1 else None
    launch = _tile_launch(logits, z, noise)
    num_v = launch.num_v
    BLOCK_V = launch.config.BLOCK_V
    groups = num_v * (BLOCK_V // launch.group_v)
    part = torch.empty(2, groups, T, dtype=torch.float32, device=device)
    score = column = above = maxima = None
    columns = min(_block_columns(V, k), launch.group_v)
    if z is not None and columns < launch.group_v:
        maxima = torch.empty(T, num_v * (BLOCK_V // columns), dtype=torch.float32, device=device)
    if k == 1:
        score = torch.empty(num_v, T, dtype=torch.float32, device=device)
        column = torch.empty(num_v, T, dtype=torch.int32, device=device)
    if label_logit is not None:
        above = torch.empty(num_v, T, dtype=torch.int32, device=device)
    seeded = None
    if noise is not None:  # a number would be compiled into the kernel if it is 1, or even
        seeded = torch.full((), noise.seed, dtype=torch.int64, device=device), noise.counters
    _best_pass_kernel[launch.grid](
        *launch.operands(logits),
        logits.labels, label_logit,
        part,
        score, column, above,
        None if z is None else _halves(launch, z), maxima,
        T, V, logits.H,
        logits.strides, 0 if z is None else z.stride(0),
        logits.vocab_start_index, logits.scalars, seeded,
        EVEN_V=V % BLOCK_V == 0, ALIGNED=_is_aligned(logits),
        GROUP_V=launch.group_v, COLUMNS=columns, **launch.constexprs,
    )  # fmt: skip
    merge_groups(
        part, (score, column, above), logits.vocab_start_index, group_v=launch.group_v,
        largest=out.largest, sums=out.sums, above=out.above,
        keys=None if k != 1 or out.pairs is None else out.pairs,
    )  # fmt: skip
    if z is not None:
        assert out.pairs is not None
        first_id = logits.vocab_start_index
        maxima = part[0].T if maxima is None else maxima  # groups are no larger than blocks
        del part  # before scratch is allocated
        winners(z, maxima, k, first_id, columns=columns, out=out.pairs)


def _halves(launch: TileLaunch, z: Tensor) -> Tensor:
    """z as the kernel stores it, half of a tile's columns at a time."""
    return matrix(z, (launch.config.BLOCK_T, launch.config.BLOCK_V // 2), launch.tma)
