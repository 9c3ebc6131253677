"""The rescue: recompute tokens (``is_rescued``) whose exponentials might overflow.

T = tokens, V = vocabulary rows here, H = hidden size.

Their reference becomes the largest logit over all ranks. The host need not know whether there is
such a token: the first kernel lists them, clears their sums, and moves the limbs of the others to
the final top bin; programs of the second share the tiles of listed tokens and add to the sums by
atomics. Additions of limbs are exact, so the bits do not depend on their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.logits.exact_sums import (
    group_sums,
    load_limbs,
    lower_limbs,
    slice_sums,
    store_limbs,
    top_bin,
)
from flce_dist.kernels.logits.launching import tile_launch
from flce_dist.kernels.logits.named_columns import named_column
from flce_dist.kernels.logits.operands import ColumnCache, ShardLogits
from flce_dist.kernels.logits.target import Target
from flce_dist.kernels.logits.tile import (
    inverse_temperatures,
    label_columns,
    logits_of,
    other_columns,
)
from flce_dist.kernels.primitives import (
    cast,
    dot,
    exp,
    first_reference,
    is_rescued,
    load_tile,
    rescued_reference,
    softcap_slope,
    tile_coordinates,
    times_exponent,
)
from flce_dist.kernels.tuning import next_power_of_2

_LISTED_AT_ONCE = 1024  # tokens of a program


@triton.jit
def _listed_tokens(label_logit_ptr, max_ptr, offs_t, T):
    """Return ``(listed, label_logit, maximum)``; listed is 1 if rescued, 0 else and beyond T."""
    label_logit = tl.load(label_logit_ptr + offs_t, mask=offs_t < T, other=0.0)
    maximum = tl.load(max_ptr + offs_t, mask=offs_t < T, other=-float("inf"))
    return is_rescued(label_logit, maximum).to(tl.int32), label_logit, maximum


@triton.jit
def _start_limbs(sums_ptr, stride_sums, offs_t, T, listed, risen, LIMBS: tl.constexpr):
    """Move a sum's limbs to the final top bin; clear those of listed tokens."""
    high, middle, low = load_limbs(sums_ptr, stride_sums, offs_t, offs_t < T, LIMBS)
    high, middle, low = lower_limbs(high, middle, low, risen, LIMBS)
    high = tl.where(listed > 0, 0.0, high)  # not by a factor: they may be inf
    middle = tl.where(listed > 0, 0.0, middle)
    low = tl.where(listed > 0, 0.0, low)
    store_limbs(sums_ptr, stride_sums, offs_t, offs_t < T, high, middle, low, LIMBS)


@triton.jit(do_not_specialize=["T", "stride_sums"])
def _list_tokens_kernel(
    label_logit_ptr, max_ptr,  # in:  [T], [T] fp32
    sums_ptr,  # in and out: [limbs + WITH_SUM_Z + 1, T] fp64
    list_ptr,  # out: [1 + T] int32: how many tokens are listed, then these in ascending order
    T, stride_sums,
    WITH_ENTROPY: tl.constexpr, WITH_SUM_Z: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_T tokens. It counts the listed ones before them by itself."""
    start = tl.program_id(0) * BLOCK_T
    before = tl.zeros((BLOCK_T,), tl.int32)
    for first in range(0, start, BLOCK_T):
        offs_t = first + tl.arange(0, BLOCK_T)
        listed, _, _ = _listed_tokens(label_logit_ptr, max_ptr, offs_t, T)
        before += listed
    offs_t = start + tl.arange(0, BLOCK_T)
    listed, label_logit, maximum = _listed_tokens(label_logit_ptr, max_ptr, offs_t, T)
    place = tl.sum(before, axis=0) + tl.cumsum(listed, axis=0)
    tl.store(list_ptr + place, offs_t, mask=listed > 0)
    if start + BLOCK_T >= T:
        tl.store(list_ptr, tl.max(place, axis=0))

    bin_ptr = sums_ptr + (2 + 3 * WITH_ENTROPY + WITH_SUM_Z) * stride_sums
    bin_here = tl.load(bin_ptr + offs_t, mask=offs_t < T, other=0.0).to(tl.int32)
    risen = top_bin(maximum, first_reference(label_logit)) - bin_here
    _start_limbs(sums_ptr, stride_sums, offs_t, T, listed, risen, 2)
    if WITH_ENTROPY:
        _start_limbs(sums_ptr + 2 * stride_sums, stride_sums, offs_t, T, listed, risen, 3)


@triton.jit
def _add_limbs(sums_ptr, stride, offs_t, mask, x, GROUP_V: tl.constexpr, LIMBS: tl.constexpr):
    """Add the columns of x [BLOCK_T, BLOCK_V] to the limbs of a sum."""
    bin = tl.zeros((x.shape[0],), tl.int32)  # as the largest exponential is 1
    terms = tl.trans(group_sums(x, GROUP_V))
    high, middle, low = slice_sums(terms, bin, GROUP_V, LIMBS)
    tl.atomic_add(sums_ptr + offs_t, high, mask=mask, sem="relaxed")
    if LIMBS == 3:
        tl.atomic_add(sums_ptr + stride + offs_t, middle, mask=mask, sem="relaxed")
    tl.atomic_add(sums_ptr + (LIMBS - 1) * stride + offs_t, low, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["T", "stride_sums"])
def _rescue_kernel(
    hidden_ptr, weight_ptr, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 global ids
    label_logit_ptr, max_ptr, list_ptr,  # in:  [T], [T] fp32, [1 + T] int32
    sums_ptr,  # in and out: [limbs, T] fp64, of listed tokens
    cache_ptr,  # out: [T, V], the same tokens
    T, V, H, stride_sums,
    strides,  # of ShardLogits, and of the cache by t; the other tuples are those of ShardLogits
    vocab_start_index, scalars, named,  # None, or the first three of NamedIds
    WITH_ENTROPY: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
    GROUP_V: tl.constexpr,
):  # fmt: skip
    """A program computes every num_programs-th tile of the logits of listed tokens."""
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h, stride_cache_t = strides
    ignore_index = scalars.ignore_index
    softcap = scalars.softcap
    count = tl.load(list_ptr)
    num_t = tl.cdiv(count, BLOCK_T)
    num_v = tl.cdiv(V, BLOCK_V)
    for tile in range(tl.program_id(0), num_t * num_v, tl.num_programs(0)):
        pid_t, pid_v = tile_coordinates(tile, num_t, num_v, GROUP_T)
        start_v = pid_v * BLOCK_V
        offs = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
        listed = offs < count
        offs_t = tl.load(list_ptr + 1 + offs, mask=listed, other=T)
        row = hidden_ptr + offs_t.to(tl.int64)[:, None] * stride_hidden_t
        acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for start_h in tl.range(0, H, BLOCK_H):
            offs_h = start_h + tl.arange(0, BLOCK_H)
            mask = listed[:, None] & (offs_h < H)[None, :]
            h = tl.load(row + offs_h.to(tl.int64)[None, :] * stride_hidden_h, mask=mask, other=0.0)
            w = load_tile(
                weight_ptr, start_v, start_h, V, H, stride_weight_v, stride_weight_h,
                BLOCK_V, BLOCK_H, TMA,
            )  # fmt: skip
            acc = dot(h, w.T, acc)
        inverse = inverse_temperatures(scalars, offs_t, listed)
        z = logits_of(acc, bias_ptr, start_v, V, scalars, inverse, BLOCK_V)

        column, _ = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
        label_logit = tl.load(label_logit_ptr + offs_t, mask=listed, other=0.0)
        others_max = tl.load(max_ptr + offs_t, mask=listed, other=0.0)
        reference = rescued_reference(label_logit, others_max)
        offs_v = start_v + tl.arange(0, BLOCK_V)
        x = other_columns(z - reference[:, None], column, offs_v, V, EVEN_V=False)
        if named is not None:
            ids_ptr, begin_ptr, end_ptr = named
            begin = tl.load(begin_ptr + offs_t, mask=listed, other=0)
            end = tl.load(end_ptr + offs_t, mask=listed, other=0)
            for i in range(0, tl.max(end - begin, axis=0)):
                column_i = named_column(ids_ptr, begin + i, end, vocab_start_index, V)
                x = other_columns(x, column_i, offs_v, V, EVEN_V=True)
        e = exp(x)
        _add_limbs(sums_ptr, stride_sums, offs_t, listed, e, GROUP_V, 2)
        if WITH_ENTROPY:
            ex = times_exponent(e, x)
            ex_ptr = sums_ptr + 2 * stride_sums
            _add_limbs(ex_ptr, stride_sums, offs_t, listed, ex, GROUP_V, 3)
        if cache_ptr is not None:
            if softcap is not None:
                e *= softcap_slope(z, softcap, inverse)
            # T * V passes 2**31 at 16k x 128k
            ptrs = cache_ptr + offs_t.to(tl.int64)[:, None] * stride_cache_t + offs_v[None, :]
            mask = listed[:, None] & (offs_v < V)[None, :]
            tl.store(ptrs, cast(e, cache_ptr.dtype.element_ty), mask=mask)


def rescue(
    logits: ShardLogits, label_logit: Tensor, others_max: Tensor, sums: Tensor,
    target: Target, *, cache: ColumnCache,
) -> None:  # fmt: skip
    """Make ``sums`` and the cache such that sums can be added over ranks.

    others_max [T] fp32 is the maximum over all ranks, sums [rows, T] fp64 are those of
    ``linear_stats``. Of rescued tokens the sums of ``exp(x)`` and ``exp(x) * x``, and the rows of
    the cache, become relative to ``pick_reference``; the sum of ``z - first_reference`` stays. The
    last row of sums means nothing any more: the top bin now follows from others_max.
    """
    T = logits.T
    V = logits.V
    if T == 0 or V == 0:
        return
    listed = logits.labels.new_empty(1 + T, dtype=torch.int32)
    named = target.named
    BLOCK_T = min(_LISTED_AT_ONCE, next_power_of_2(T))
    _list_tokens_kernel[(-(-T // BLOCK_T),)](
        label_logit, others_max,
        sums,
        listed,
        T, sums.stride(0),
        WITH_ENTROPY=target.with_entropy, WITH_SUM_Z=target.with_sum_z, BLOCK_T=BLOCK_T,
    )  # fmt: skip
    for start, end, window in cache.split(V, V, V):
        # Pointers: here descriptors would cost the host more time than they save on the GPU.
        part = logits.columns(start, end)
        launch = tile_launch(part, pointers=True)
        _rescue_kernel[launch.grid](
            *launch.operands(part), logits.labels,
            label_logit, others_max, listed,
            sums,
            window,
            T, end - start, logits.H, sums.stride(0),
            (*part.strides, 0 if window is None else window.stride(0)),
            part.vocab_start_index, part.scalars,
            None if named is None else (named.ids, named.begin, named.end),
            WITH_ENTROPY=target.with_entropy, GROUP_V=launch.group_v, **launch.constexprs,
        )  # fmt: skip
