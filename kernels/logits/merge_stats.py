"""The merge kernel: from the partial statistics of tiles to the statistics of T tokens.

``linear_stats`` leaves for each token the maximum of each tile of columns, and a sum of each group
of columns, all fp32. Their maximum and exact sums (``exact_sums``) over a segment are computed
here. A later segment continues the results of those before it, and may raise the top bin.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.logits.exact_sums import (
    load_limbs,
    lower_limbs,
    slice_sums,
    store_limbs,
    sum_z_slice,
    top_bin,
)
from flce_dist.kernels.logits.launching import TileLaunch, tokens_of_merge
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.logits.target import Target
from flce_dist.kernels.primitives import computed, first_reference
from flce_dist.kernels.tuning import next_power_of_2

_AT_ONCE = 4096  # numbers of a block: what the registers of 4 warps hold


@triton.jit
def parts_at(part_ptr, start, N, T, offs_t, mask_t, BLOCK_N: tl.constexpr):
    """Pointers and mask [BLOCK_N, BLOCK_T]: of a part [N, T], the rows from ``start`` on."""
    n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    mask = (n < N) & mask_t[None, :]
    return part_ptr + n * T + offs_t[None, :], mask


@triton.jit
def _merge_limbs(
    part_ptr, sums_ptr, N, T, stride_sums, offs_t, mask_t, bin, risen,
    GROUP_V: tl.constexpr, LIMBS: tl.constexpr, FIRST: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the terms [N, T] to the limbs [LIMBS, T] of a sum, whose top bin has risen to ``bin``."""
    high = tl.zeros(bin.shape, tl.float64)
    middle = high
    low = high
    if not FIRST:
        high, middle, low = load_limbs(sums_ptr, stride_sums, offs_t, mask_t, LIMBS)
        high, middle, low = lower_limbs(high, middle, low, risen, LIMBS)
    for start in range(0, N, BLOCK_N):
        ptrs, mask = parts_at(part_ptr, start, N, T, offs_t, mask_t, BLOCK_N)
        terms = tl.load(ptrs, mask=mask, other=0.0)
        more_high, more_middle, more_low = slice_sums(terms, bin, GROUP_V, LIMBS)
        high += more_high
        middle += more_middle
        low += more_low
    store_limbs(sums_ptr, stride_sums, offs_t, mask_t, high, middle, low, LIMBS)


@triton.jit(do_not_specialize=["T", "stride_sums"])
def _merge_kernel(
    part_ptr, label_logit_ptr, count_ptr,  # in:  [num_v * (1 + sums * GROUPS), T], [T] fp32, []
    max_ptr, sums_ptr,  # in and out: [T] fp32, [rows, T] fp64 (see new_sums)
    num_v, T, stride_sums,
    WITH_ENTROPY: tl.constexpr, WITH_SUM_Z: tl.constexpr, FIRST: tl.constexpr,
    GROUP_V: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program merges all statistics of BLOCK_T tokens, BLOCK_N rows of ``part`` at a time."""
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < T
    reference = first_reference(tl.load(label_logit_ptr + offs_t, mask=mask_t, other=0.0))
    row_max = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    if not FIRST:
        row_max = tl.load(max_ptr + offs_t, mask=mask_t, other=0.0)
    bin_before = top_bin(row_max, reference)
    plane = tl.cast(num_v, tl.int64) * T
    if count_ptr is not None:  # of these tokens no tile may have been computed
        num_v = tl.where(tl.program_id(0) * BLOCK_T < computed(count_ptr, T), num_v, 0)
    for start in range(0, num_v, BLOCK_N):
        ptrs, mask = parts_at(part_ptr, start, num_v, T, offs_t, mask_t, BLOCK_N)
        part = tl.load(ptrs, mask=mask, other=-float("inf"))
        row_max = tl.maximum(row_max, tl.max(part, axis=0))
    tl.store(max_ptr + offs_t, row_max, mask=mask_t)

    bin = top_bin(row_max, reference)
    risen = bin - bin_before
    N = num_v * GROUPS
    part_ptr += plane
    plane *= GROUPS
    _merge_limbs(
        part_ptr, sums_ptr, N, T, stride_sums, offs_t, mask_t, bin, risen,
        GROUP_V, 2, FIRST, BLOCK_N,
    )  # fmt: skip
    sums_ptr += 2 * stride_sums
    part_ptr += plane
    if WITH_ENTROPY:
        _merge_limbs(
            part_ptr, sums_ptr, N, T, stride_sums, offs_t, mask_t, bin, risen,
            GROUP_V, 3, FIRST, BLOCK_N,
        )  # fmt: skip
        sums_ptr += 3 * stride_sums
        part_ptr += plane
    if WITH_SUM_Z:
        sum_z = tl.zeros((BLOCK_T,), tl.float64)
        if not FIRST:
            sum_z = tl.load(sums_ptr + offs_t, mask=mask_t, other=0.0)
        for start in range(0, N, BLOCK_N):
            ptrs, mask = parts_at(part_ptr, start, N, T, offs_t, mask_t, BLOCK_N)
            terms = tl.load(ptrs, mask=mask, other=0.0)
            sum_z += tl.sum(sum_z_slice(terms), axis=0)
        tl.store(sums_ptr + offs_t, sum_z, mask=mask_t)
        sums_ptr += stride_sums
    tl.store(sums_ptr + offs_t, bin.to(tl.float64), mask=mask_t)


def new_sums(logits: ShardLogits, target: Target) -> Tensor:
    """Return uninitialised [rows, T] fp64 for the sums of ``linear_stats``.

    Rows: 2 limbs of the sum of ``exp(x)``, 3 of ``exp(x) * x`` if with_entropy, the sum of x itself
    if with_sum_z, and the number of the top bin.
    """
    rows = 2 + 3 * target.with_entropy + target.with_sum_z + 1
    return logits.hidden.new_empty(rows, logits.T, dtype=torch.float64)


def merge_stats(
    part: Tensor, label_logit: Tensor, launch: TileLaunch, target: Target, *,
    n_counted: Tensor | None, first: bool, others_max: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Merge ``part`` of ``launch`` into the results; tokens from n_counted on get -inf and 0."""
    T = launch.T
    groups = launch.config.BLOCK_V // launch.group_v
    BLOCK_T = tokens_of_merge(T)
    at_once = _AT_ONCE // 2 if target.with_entropy else _AT_ONCE
    BLOCK_N = min(at_once // BLOCK_T, next_power_of_2(launch.num_v * groups))
    _merge_kernel[(-(-T // BLOCK_T),)](
        part, label_logit, n_counted,
        others_max, sums,
        launch.num_v, T, sums.stride(0),
        WITH_ENTROPY=target.with_entropy, WITH_SUM_Z=target.with_sum_z, FIRST=first,
        GROUP_V=launch.group_v, GROUPS=groups,
        BLOCK_N=BLOCK_N, BLOCK_T=BLOCK_T, num_warps=4,
    )  # fmt: skip
