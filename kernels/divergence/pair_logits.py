"""Logits of one model of a pair, stored in fp32, and what a token's divergence needs of a shard.

One GEMM, ``hidden @ weight.T``, in a persistent grid. Its epilogue takes the maximum of each tile
and the sum of exponentials relative to it; of the second model it reads the logits of the first
again, and sums the differences of both, weighed by the exponentials of the first. Another kernel
merges what tiles have left. Both models pass through the same code, so that equal ones have equal
bits.

T = tokens, V = vocabulary rows here, H = hidden size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.logits.launching import matrix, tile_launch, tokens_of_merge
from flce_dist.kernels.logits.merge_stats import parts_at
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.logits.tile import logits_tile
from flce_dist.kernels.primitives import (
    computed,
    exp,
    finite,
    halves,
    load_tile,
    store_tile,
    tile_coordinates,
)
from flce_dist.kernels.tuning import next_power_of_2

_PARTS = 4  # of a tile's columns: registers hold the first model's logits of one at a time


@triton.jit
def _take_part(
    x, reference, first, z, start_t, start_v, T, V, stride_z_t,
    EVEN_V: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Return the sums of x, some columns of a tile, and store it if there is ``z``."""
    if z is not None:
        store_tile(z, x, start_t, start_v, T, V, stride_z_t, x.shape[0], x.shape[1], TMA)
    weighted = tl.zeros((x.shape[0],), tl.float32)
    if first is not None:
        logits, first_reference, stride_first_t = first
        y = load_tile(
            logits, start_t, start_v, T, V, stride_first_t, 1, x.shape[0], x.shape[1], TMA
        )  # fmt: skip
        w = exp(y - first_reference[:, None])
        if not EVEN_V:
            offs_v = start_v + tl.arange(0, x.shape[1])
            w = tl.where((offs_v < V)[None, :], w, 0.0)
        # The difference is infinite where x is banned, and NaN where both are.
        weighted = tl.sum(tl.where(w == 0.0, 0.0, w * (y - x)), axis=1)
    return tl.sum(exp(x - reference[:, None]), axis=1), weighted


@triton.jit
def _take_parts(
    x, reference, first, z, start_t, start_v, T, V, stride_z_t,
    EVEN_V: tl.constexpr, TMA: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``_take_part`` of each of PARTS parts of the columns of x, in order."""
    if PARTS == 1:
        total, weighted = _take_part(
            x, reference, first, z, start_t, start_v, T, V, stride_z_t, EVEN_V, TMA
        )  # fmt: skip
    else:
        left, right = halves(x)
        total, weighted = _take_parts(
            left, reference, first, z, start_t, start_v, T, V, stride_z_t,
            EVEN_V, TMA, PARTS // 2,
        )  # fmt: skip
        more, more_weighted = _take_parts(
            right, reference, first, z, start_t, start_v + x.shape[1] // 2, T, V, stride_z_t,
            EVEN_V, TMA, PARTS // 2,
        )  # fmt: skip
        total += more
        weighted += more_weighted
    return total, weighted


@triton.jit(do_not_specialize=["T"])
def _pair_logits_kernel(
    hidden, weight, bias_ptr,  # in:  [T, H], [V, H], [V]
    first_z, first_max_ptr,  # in:  [T, V], [T] fp32 of the first model, or None
    z,  # out: [T, V] fp32; like first_z, hidden and weight a descriptor if TMA, else a pointer
    part_ptr,  # out: [2 or 3, num_v, T] fp32: maxima, sums, and of a second model differences
    T, V, H,
    strides, stride_first_t, stride_z_t, scalars,  # the tuples are those of ShardLogits
    EVEN_V: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """A program computes every num_programs-th tile of logits."""
    num_t = tl.cdiv(computed(scalars.n_counted, T), BLOCK_T)
    num_v = tl.cdiv(V, BLOCK_V)
    plane = tl.cast(num_v, tl.int64) * T
    for tile in tl.range(tl.program_id(0), num_t * num_v, tl.num_programs(0), flatten=True):
        pid_t, pid_v = tile_coordinates(tile, num_t, num_v, GROUP_T)
        start_t = pid_t * BLOCK_T
        start_v = pid_v * BLOCK_V
        offs_t = start_t + tl.arange(0, BLOCK_T)
        mask_t = offs_t < T
        first = None
        if first_z is not None:  # loaded before the GEMM, which hides the latency
            first_max = tl.load(first_max_ptr + offs_t, mask=mask_t, other=0.0)
            first = (first_z, finite(first_max), stride_first_t)
        x = logits_tile(
            hidden, weight, bias_ptr, start_t, start_v, T, V, H,
            strides, scalars, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip
        if not EVEN_V:
            offs_v = start_v + tl.arange(0, BLOCK_V)
            x += tl.where(offs_v < V, 0.0, -float("inf"))[None, :]
        maximum = tl.max(x, axis=1)
        reference = finite(maximum)

        total, weighted = _take_parts(
            x, reference, first, z, start_t, start_v, T, V, stride_z_t,
            EVEN_V, TMA, PARTS,
        )  # fmt: skip
        ptrs = part_ptr + pid_v.to(tl.int64) * T + offs_t
        tl.store(ptrs, maximum, mask=mask_t)
        tl.store(ptrs + plane, total, mask=mask_t)
        if first_z is not None:
            tl.store(ptrs + 2 * plane, weighted, mask=mask_t)


@triton.jit(do_not_specialize=["T", "stride_rows"])
def _merge_pair_kernel(
    part_ptr, count_ptr,  # in:  [2 or 3, num_v, T] fp32, [] int32
    rows_ptr,  # out: [2 or 3, T] fp32
    num_v, T,
    stride_rows,
    WEIGHED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program merges the tiles of BLOCK_T tokens; of tokens not computed there are none."""
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < T
    plane = tl.cast(num_v, tl.int64) * T
    if count_ptr is not None:
        num_v = tl.where(tl.program_id(0) * BLOCK_T < computed(count_ptr, T), num_v, 0)
    maximum = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    for start in range(0, num_v, BLOCK_N):
        ptrs, mask = parts_at(part_ptr, start, num_v, T, offs_t, mask_t, BLOCK_N)
        part = tl.load(ptrs, mask=mask, other=-float("inf"))
        maximum = tl.maximum(maximum, tl.max(part, axis=0))
    reference = finite(maximum)
    total = tl.zeros((BLOCK_T,), tl.float32)
    weighted = total
    for start in range(0, num_v, BLOCK_N):
        ptrs, mask = parts_at(part_ptr, start, num_v, T, offs_t, mask_t, BLOCK_N)
        factor = exp(tl.load(ptrs, mask=mask, other=-float("inf")) - reference[None, :])
        total += tl.sum(factor * tl.load(ptrs + plane, mask=mask, other=0.0), axis=0)
        if WEIGHED:
            weighted += tl.sum(tl.load(ptrs + 2 * plane, mask=mask, other=0.0), axis=0)
    tl.store(rows_ptr + offs_t, maximum, mask=mask_t)
    tl.store(rows_ptr + stride_rows + offs_t, total, mask=mask_t)
    if WEIGHED:
        tl.store(rows_ptr + 2 * stride_rows + offs_t, weighted, mask=mask_t)


def pair_logits(
    logits: ShardLogits, *,
    out: Tensor | None, rows: Tensor, first: Tensor | None = None, first_max: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the logits z to ``out`` [T, V] fp32, if given, and what they yield to ``rows`` [k, T].

    rows are the maximum and the sum of exponentials relative to it. With the logits ``first``
    [T, V] of a first model and their maximum ``first_max`` [T], a third row is the sum of
    ``exp(first - first_max) (first - z)``.
    """
    T = logits.T
    V = logits.V
    if T == 0 or V == 0:
        rows.zero_()
        rows[0].fill_(-torch.inf)
        return
    launch = tile_launch(logits, first if out is None else out)
    block = launch.config.BLOCK_T, launch.config.BLOCK_V // _PARTS
    part = rows.new_empty(len(rows), launch.num_v, T)

    def tiles(x: Tensor | None) -> Any:
        return None if x is None else matrix(x, block, launch.tma)

    _pair_logits_kernel[launch.grid](
        *launch.operands(logits),
        tiles(first), first_max,
        tiles(out),
        part,
        T, V, logits.H,
        logits.strides, 0 if first is None else first.stride(0),
        0 if out is None else out.stride(0), logits.scalars,
        EVEN_V=V % launch.config.BLOCK_V == 0, PARTS=_PARTS, **launch.constexprs,
    )  # fmt: skip
    BLOCK_T = tokens_of_merge(T)
    _merge_pair_kernel[(-(-T // BLOCK_T),)](
        part, logits.n_counted,
        rows,
        launch.num_v, T,
        rows.stride(0),
        WEIGHED=first is not None,
        BLOCK_N=min(512, next_power_of_2(launch.num_v)), BLOCK_T=BLOCK_T, num_warps=4,
    )  # fmt: skip
