"""The rescue: recompute tokens whose exponentials relative to the label's logit would overflow.

T = tokens, V = vocabulary rows here, H = hidden size.

``is_rescued`` of ``token_loss_formulas.py`` says which tokens these are. Their reference becomes
the largest logit over all ranks. Both kernels are always launched, so the host need not know
whether there is such a token. Programs of the first return at once if there is none; otherwise they
share the columns of all rescued tokens, so that a single one costs little. The second kernel
replaces the sums of rescued tokens, and moves the limbs of the others to the top bin that follows
from the maximum over all ranks.
"""

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
    top_bin,
)
from flce_dist.kernels.launching import MAX_PART_BYTES, tile_launch
from flce_dist.kernels.primitives import (
    cast,
    exp,
    first_reference,
    is_rescued,
    label_columns,
    logits_tile,
    other_columns,
    softcap_slope,
    times_exponent,
)
from flce_dist.kernels.shard_logits import ShardLogits


@triton.jit
def _flagged_tokens(label_logit_ptr, max_ptr, offs_t, T):
    """Return ``(flagged, reference)``: whether tokens are rescued, false beyond T; the maximum."""
    label_logit = tl.load(label_logit_ptr + offs_t, mask=offs_t < T, other=0.0)
    maximum = tl.load(max_ptr + offs_t, mask=offs_t < T, other=-float("inf"))
    return is_rescued(label_logit, maximum), tl.maximum(maximum, label_logit)


@triton.jit
def _rescue_kernel(
    hidden, weight, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 (global ids)
    label_logit_ptr, max_ptr,  # in:  [T], [T] fp32
    part_ptr,  # out: [limbs, programs, T] fp64, only flagged tokens
    cache_ptr,  # out: [T, V], the same tokens
    T, V, H,
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h, stride_cache_t,
    vocab_start_index, ignore_index, logit_scale, softcap,
    WITH_ENTROPY: tl.constexpr, HAS_CACHE: tl.constexpr,
    EVEN_V: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
    GROUP_V: tl.constexpr, HEADROOM: tl.constexpr, ENTROPY_HEADROOM: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):  # fmt: skip
    """A program adds up every num_programs-th tile of columns, for each block of flagged tokens."""
    any_flagged = tl.zeros((BLOCK_SCAN,), tl.int32)
    for start in range(0, T, BLOCK_SCAN):
        offs = start + tl.arange(0, BLOCK_SCAN)
        flagged, _ = _flagged_tokens(label_logit_ptr, max_ptr, offs, T)
        any_flagged |= flagged.to(tl.int32)
    num_t = tl.cdiv(T, BLOCK_T) * tl.max(any_flagged, axis=0)  # 0 if none is flagged
    part_ptr += tl.program_id(0).to(tl.int64) * T
    plane = tl.num_programs(0).to(tl.int64) * T
    for pid_t in range(0, num_t):
        offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
        flagged, reference = _flagged_tokens(label_logit_ptr, max_ptr, offs_t, T)
        if tl.max(flagged.to(tl.int32), axis=0) > 0:
            column, _ = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
            bin = tl.zeros((BLOCK_T,), tl.int32)  # as the largest exponential is 1
            high = tl.zeros((BLOCK_T,), tl.float64)
            low, ex_high, ex_middle, ex_low = high, high, high, high
            for pid_v in range(tl.program_id(0), tl.cdiv(V, BLOCK_V), tl.num_programs(0)):
                start_v = pid_v * BLOCK_V
                z = logits_tile(
                    hidden, weight, bias_ptr, pid_t * BLOCK_T, start_v, T, V, H,
                    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h,
                    logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
                )  # fmt: skip
                offs_v = start_v + tl.arange(0, BLOCK_V)
                x = z - reference[:, None]
                x = other_columns(x, column, offs_v, V, EVEN_V)
                e = exp(x)
                terms = tl.trans(group_sums(e, GROUP_V))
                more_high, _unused, more_low = slice_sums(terms, bin, HEADROOM, 2)
                high += more_high
                low += more_low
                if WITH_ENTROPY:
                    terms = tl.trans(group_sums(times_exponent(e, x), GROUP_V))
                    more_high, more_middle, more_low = slice_sums(terms, bin, ENTROPY_HEADROOM, 3)
                    ex_high += more_high
                    ex_middle += more_middle
                    ex_low += more_low
                if HAS_CACHE:
                    if HAS_SOFTCAP:
                        e *= softcap_slope(z, softcap)
                    # T * V passes 2**31 at 16k x 128k
                    offs = offs_t.to(tl.int64)[:, None] * stride_cache_t + offs_v[None, :]
                    mask = flagged[:, None] & (offs_v < V)[None, :]
                    tl.store(cache_ptr + offs, cast(e, cache_ptr.dtype.element_ty), mask=mask)
            store_limbs(part_ptr, plane, offs_t, flagged, high, high, low, 2)
            if WITH_ENTROPY:
                ex_ptr = part_ptr + 2 * plane
                store_limbs(ex_ptr, plane, offs_t, flagged, ex_high, ex_middle, ex_low, 3)


@triton.jit
def _final_limbs(
    part_ptr, sums_ptr, num_ranges, N, T, stride_range, stride_sums,
    offs_t, flagged, any_flagged, risen,
    LIMBS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Move a sum's limbs to the final top bin; replace those of flagged tokens."""
    mask_t = offs_t < T
    high, middle, low = load_limbs(sums_ptr, stride_sums, offs_t, mask_t, LIMBS)
    high, middle, low = lower_limbs(high, middle, low, risen, LIMBS)
    store_limbs(sums_ptr, stride_sums, offs_t, mask_t, high, middle, low, LIMBS)
    if any_flagged > 0:
        for limb in tl.static_range(LIMBS):
            total = tl.zeros(risen.shape, tl.float64)
            for start in range(0, num_ranges * N, BLOCK_N):
                n = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
                rows = n // N * stride_range + (limb * N + n % N) * T
                mask = (n < num_ranges * N)[:, None] & flagged[None, :]
                part = tl.load(part_ptr + rows[:, None] + offs_t[None, :], mask=mask, other=0.0)
                total += tl.sum(part, axis=0)
            tl.store(sums_ptr + limb * stride_sums + offs_t, total, mask=flagged)


@triton.jit
def _replace_sums_kernel(
    part_ptr, label_logit_ptr, max_ptr,  # in:  [num_ranges, limbs, N, T] fp64, [T], [T] fp32
    sums_ptr,  # in and out: [limbs + WITH_SUM_Z + 1, T] fp64
    num_ranges, N, T,
    stride_range, stride_sums,
    WITH_ENTROPY: tl.constexpr, WITH_SUM_Z: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_T tokens. N programs of the first kernel worked on each range."""
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    flagged, _ = _flagged_tokens(label_logit_ptr, max_ptr, offs_t, T)
    any_flagged = tl.max(flagged.to(tl.int32), axis=0)
    label_logit = tl.load(label_logit_ptr + offs_t, mask=offs_t < T, other=0.0)
    maximum = tl.load(max_ptr + offs_t, mask=offs_t < T, other=-float("inf"))
    bin_ptr = sums_ptr + (2 + 3 * WITH_ENTROPY + WITH_SUM_Z) * stride_sums
    bin_here = tl.load(bin_ptr + offs_t, mask=offs_t < T, other=0.0).to(tl.int32)
    risen = top_bin(maximum, first_reference(label_logit)) - bin_here
    _final_limbs(
        part_ptr, sums_ptr, num_ranges, N, T, stride_range, stride_sums,
        offs_t, flagged, any_flagged, risen, 2, BLOCK_N,
    )  # fmt: skip
    if WITH_ENTROPY:
        part_ptr += 2 * tl.cast(N, tl.int64) * T
        _final_limbs(
            part_ptr, sums_ptr + 2 * stride_sums, num_ranges, N, T, stride_range, stride_sums,
            offs_t, flagged, any_flagged, risen, 3, BLOCK_N,
        )  # fmt: skip


def rescue(
    logits: ShardLogits,
    label_logit: Tensor,
    others_max: Tensor,
    sums: Tensor,
    *,
    cache: ColumnCache,
    with_entropy: bool,
) -> Tensor:
    """Return what is to be summed over ranks: a view of ``sums``, written in place.

    others_max [T] fp32 is the maximum over all ranks, sums [rows, T] fp64 are those of
    ``linear_stats``. Of rescued tokens the sums of ``exp(x)`` and ``exp(x) * x``, and the rows of
    the cache, become relative to ``pick_reference``; the sum of ``z - first_reference`` stays. The
    result lacks the last row of sums: the top bin now follows from others_max.
    """
    T, V = logits.T, logits.V
    final = sums[:-1]
    if T == 0 or V == 0:
        return final
    limbs = 2 + 3 * with_entropy
    ranges = list(cache.split(V, V, V))  # of columns: each window of the cache, then the others
    most = MAX_PART_BYTES // (8 * limbs * T * len(ranges))
    # Pointers: here descriptors would cost the host more time than they save on the GPU.
    launches = [tile_launch(logits.columns(a, b), pointers=True) for a, b, _ in ranges]
    programs = max(1, min(launches[0].programs, most, *(launch.num_v for launch in launches)))
    part = sums.new_empty(len(ranges), limbs, programs, T)
    for i, (start, end, window) in enumerate(ranges):
        launch = launches[i]
        _rescue_kernel[(programs,)](
            *launch.operands(), logits.labels,
            label_logit, others_max,
            part[i],
            window,
            T, end - start, logits.H,
            *launch.strides(), 0 if window is None else window.stride(0),
            logits.vocab_start_index + start, *launch.scalars(),
            WITH_ENTROPY=with_entropy,
            HAS_CACHE=window is not None,
            EVEN_V=(end - start) % launch.config.BLOCK_V == 0,
            GROUP_V=launch.group_v,
            **launch.headrooms(),
            BLOCK_SCAN=2048,
            **launch.constexprs(),
        )  # fmt: skip
    _replace_sums_kernel[(-(-T // 128),)](
        part, label_logit, others_max,
        sums,
        len(ranges), programs, T,
        part.stride(0), sums.stride(0),
        WITH_ENTROPY=with_entropy,
        WITH_SUM_Z=final.shape[0] > limbs,
        BLOCK_N=32, BLOCK_T=128,
    )  # fmt: skip
    return final
