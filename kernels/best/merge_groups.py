"""From the statistics of groups of columns to those of tokens, and their merge over ranks.

T = tokens, N = groups of columns, num_v = tiles of columns.

A group has its largest logit m and the sum s of ``exp(z - m)``, and its term is ``s * exp(m)``.
Terms are added exactly (``exact_sums``), so that bits depend neither on the order nor on shards.
Bins are those of ``exp(z)`` itself, without a reference: bin b begins at ``2 ** (38 b)``. Limbs are
divided by that power for the top bin, so that fp64 can hold them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.best.keys import LOWEST_KEY, key_of
from flce_dist.kernels.logits.exact_sums import BIN_BITS, lower_limbs, slice_sums
from flce_dist.kernels.logits.launching import tokens_of_merge
from flce_dist.kernels.logits.merge_stats import parts_at
from flce_dist.kernels.primitives import LN2, LOG2E, finite
from flce_dist.kernels.tuning import next_power_of_2

_BIN_BELOW = tl.constexpr(2.0**-BIN_BITS.value)
_AT_ONCE = 2048  # numbers of a block: what the registers of 4 warps hold
_TOKENS = 128  # of a program of the small kernels


@triton.jit
def _bin_of(largest):
    """The bin of ``exp(largest)`` as an fp64 number; far below all others for -inf."""
    exponent = tl.floor(largest.to(tl.float64) * LOG2E)
    return tl.floor(tl.maximum(exponent, -1e15) / BIN_BITS)


@triton.jit
def _terms(largest, total, bin):
    """``total * exp(largest)`` over ``2 ** (38 bin)``, rounded before it is divided; fp64."""
    exponent = finite(largest).to(tl.float64) * LOG2E
    whole = tl.floor(exponent)
    factor = total.to(tl.float64) * tl.exp2(exponent - whole)
    shift = tl.maximum(tl.minimum(whole - bin * BIN_BITS, 200.0), -1000.0)
    return factor * ((shift + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["T", "stride_sums"])
def _merge_groups_kernel(
    part_ptr, score_ptr, column_ptr, above_ptr,  # in:  [2 N, T], [num_v, T] fp32, int32 twice
    largest_ptr, sums_ptr, total_above_ptr, keys_ptr,  # out: [T] fp32, [2, T] fp64, [T] int64 twice
    N, num_v, T, stride_sums,
    first_id,
    GROUP_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program merges BLOCK_T tokens, BLOCK_N groups or tiles at a time."""
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < T
    largest = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    for start in range(0, N, BLOCK_N):
        ptrs, mask = parts_at(part_ptr, start, N, T, offs_t, mask_t, BLOCK_N)
        m = tl.load(ptrs, mask=mask, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(m, axis=0))
    tl.store(largest_ptr + offs_t, largest, mask=mask_t)

    bin = _bin_of(largest)
    of_terms = tl.zeros((BLOCK_T,), tl.int32)
    high = tl.zeros((BLOCK_T,), tl.float64)
    low = high
    plane = tl.cast(N, tl.int64) * T
    for start in range(0, N, BLOCK_N):
        ptrs, mask = parts_at(part_ptr, start, N, T, offs_t, mask_t, BLOCK_N)
        m = tl.load(ptrs, mask=mask, other=-float("inf"))
        total = tl.load(ptrs + plane, mask=mask, other=0.0)
        terms = _terms(m, total, bin[None, :])
        more_high, _, more_low = slice_sums(terms, of_terms, GROUP_V, 2)
        high += more_high
        low += more_low
    tl.store(sums_ptr + offs_t, high, mask=mask_t)
    tl.store(sums_ptr + stride_sums + offs_t, low, mask=mask_t)

    if above_ptr is not None:
        above = tl.zeros((BLOCK_T,), tl.int64)
        for start in range(0, num_v, BLOCK_N):
            ptrs, mask = parts_at(above_ptr, start, num_v, T, offs_t, mask_t, BLOCK_N)
            more = tl.load(ptrs, mask=mask, other=0)
            above += tl.sum(more, axis=0)
        tl.store(total_above_ptr + offs_t, above, mask=mask_t)
    if keys_ptr is not None:
        best = tl.full((BLOCK_T,), LOWEST_KEY, tl.int64)
        for start in range(0, num_v, BLOCK_N):
            n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
            mask = (n < num_v) & mask_t[None, :]
            place = n * T + offs_t[None, :]
            score = tl.load(score_ptr + place, mask=mask, other=-float("inf"))
            column = tl.load(column_ptr + place, mask=mask, other=0)
            key = tl.where(score > -float("inf"), key_of(score, first_id + column), LOWEST_KEY)
            best = tl.maximum(best, tl.max(key, axis=0))
        tl.store(keys_ptr + offs_t, best, mask=mask_t)


def merge_groups(
    part: Tensor, of_tiles: tuple[Tensor | None, Tensor | None, Tensor | None], first_id: int, *,
    group_v: int, largest: Tensor, sums: Tensor, above: Tensor | None, keys: Tensor | None,
) -> None:  # fmt: skip
    """Merge parts of T tokens into ``largest`` [T], ``sums`` [2, T], ``above`` [T] and keys [T].

    part is [2, N, T] fp32: maxima and sums of groups. ``of_tiles`` are scores [num_v, T] fp32 and
    their columns int32, for the keys, and int32 counts.
    """
    _, N, T = part.shape
    num_v = max((len(x) for x in of_tiles if x is not None), default=0)
    BLOCK_T = tokens_of_merge(T)
    BLOCK_N = min(_AT_ONCE // BLOCK_T, next_power_of_2(N))
    _merge_groups_kernel[(-(-T // BLOCK_T),)](
        part, *of_tiles,
        largest, sums, above, keys,
        N, num_v, T, sums.stride(0),
        first_id,
        GROUP_V=group_v, BLOCK_N=BLOCK_N, BLOCK_T=BLOCK_T, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _relative_kernel(
    largest_ptr, of_all_ptr,  # in:  [T] fp32 each
    sums_ptr,  # in and out: [2, T] fp64
    T,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < T
    here = _bin_of(tl.load(largest_ptr + offs_t, mask=mask_t, other=0.0))
    risen = _bin_of(tl.load(of_all_ptr + offs_t, mask=mask_t, other=0.0)) - here
    risen = tl.minimum(risen, 2.0).to(tl.int32)
    high = tl.load(sums_ptr + offs_t, mask=mask_t, other=0.0)
    low = tl.load(sums_ptr + T + offs_t, mask=mask_t, other=0.0)
    high, _, low = lower_limbs(high, high, low, risen, 2)
    low *= tl.where(risen == 1, _BIN_BELOW, 1.0)  # limbs are relative to the top bin
    tl.store(sums_ptr + offs_t, high, mask=mask_t)
    tl.store(sums_ptr + T + offs_t, low, mask=mask_t)


def relative_to(largest: Tensor, of_all: Tensor, sums: Tensor) -> None:
    """Change ``sums`` of a shard such that those of all ranks can be added.

    ``largest`` [T] is that of the shard, ``of_all`` [T] the largest logit of all ranks.
    """
    T = len(largest)
    if T:
        _relative_kernel[(-(-T // _TOKENS),)](
            largest, of_all,
            sums,
            T,
            BLOCK_T=_TOKENS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _lse_kernel(
    largest_ptr, sums_ptr,  # in:  [T] fp32, [2, T] fp64
    lse_ptr,  # out: [T] fp64
    T,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_t = offs_t < T
    bin = _bin_of(tl.load(largest_ptr + offs_t, mask=mask_t, other=0.0))
    total = tl.load(sums_ptr + offs_t, mask=mask_t, other=1.0)
    total += tl.load(sums_ptr + T + offs_t, mask=mask_t, other=0.0)
    lse = tl.log(total) + bin * BIN_BITS * LN2
    tl.store(lse_ptr + offs_t, lse, mask=mask_t)


def merged_lse(largest: Tensor, sums: Tensor) -> Tensor:
    """Return lse [T] fp64 of the sums and the largest logit of all ranks; -inf if all are banned,
    NaN if a logit is NaN or inf.
    """
    lse = torch.empty_like(largest, dtype=torch.float64)
    if T := len(largest):
        _lse_kernel[(-(-T // _TOKENS),)](
            largest, sums,
            lse,
            T,
            BLOCK_T=_TOKENS,
        )  # fmt: skip
    return lse
