"""The rescue of tokens whose label is so improbable that exponentials relative to it overflow.

T = tokens, V = vocabulary rows here, H = hidden size.

Such rows take the largest logit over all ranks as their reference and are computed again. Both
kernels are launched always and are done at once where there is no such row, so the host need not
know; the rows' columns are spread over all programs, so that a single one costs little.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.column_cache import ColumnCache
from flce_dist.kernels.launching import MAX_PART_BYTES, tile_launch
from flce_dist.kernels.linear_stats import other_columns, row_sum_ex
from flce_dist.kernels.merge import RESCUE_ABOVE
from flce_dist.kernels.primitives import (
    cast,
    exp,
    label_columns,
    logits_tile,
    softcap_slope,
)
from flce_dist.kernels.shard_logits import ShardLogits


@triton.jit
def _flagged_rows(label_logit_ptr, max_ptr, offs_t, T, ABOVE: tl.constexpr):
    """``(flagged, maximum)`` of tokens; those beyond T are not flagged."""
    label_logit = tl.load(label_logit_ptr + offs_t, mask=offs_t < T, other=0.0)
    maximum = tl.load(max_ptr + offs_t, mask=offs_t < T, other=-float("inf"))
    return maximum - label_logit > ABOVE, maximum


@triton.jit
def _rescue_kernel(
    hidden, weight, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 (global ids)
    label_logit_ptr, max_ptr,  # in:  [T], [T] fp32
    part_ptr,  # out: [1 + WITH_ENTROPY, programs, T] fp32, only flagged rows
    cache_ptr,  # out: [T, V], the same rows
    T, V, H,
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h, stride_cache_t,
    vocab_start_index, ignore_index, logit_scale, softcap,
    ABOVE: tl.constexpr, WITH_ENTROPY: tl.constexpr, HAS_CACHE: tl.constexpr,
    EVEN_V: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):  # fmt: skip
    any_flagged = tl.zeros((BLOCK_SCAN,), tl.int32)
    for start in range(0, T, BLOCK_SCAN):
        offs = start + tl.arange(0, BLOCK_SCAN)
        flagged, _ = _flagged_rows(label_logit_ptr, max_ptr, offs, T, ABOVE)
        any_flagged |= flagged.to(tl.int32)
    num_t = tl.cdiv(T, BLOCK_T) * tl.max(any_flagged, axis=0)  # 0: nothing to do
    part_ptr += tl.program_id(0).to(tl.int64) * T
    plane = tl.num_programs(0).to(tl.int64) * T
    for pid_t in range(0, num_t):
        offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
        flagged, reference = _flagged_rows(label_logit_ptr, max_ptr, offs_t, T, ABOVE)
        if tl.max(flagged.to(tl.int32), axis=0) > 0:
            column, _ = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
            others = tl.zeros((BLOCK_T,), tl.float32)
            sum_ex = tl.zeros((BLOCK_T,), tl.float32)
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
                others += tl.sum(e, axis=1)
                if WITH_ENTROPY:
                    sum_ex += row_sum_ex(e, x)
                if HAS_CACHE:
                    if HAS_SOFTCAP:
                        e *= softcap_slope(z, softcap)
                    # T * V passes 2**31 at 16k x 128k
                    cells = offs_t.to(tl.int64)[:, None] * stride_cache_t + offs_v[None, :]
                    mask = flagged[:, None] & (offs_v < V)[None, :]
                    tl.store(cache_ptr + cells, cast(e, cache_ptr.dtype.element_ty), mask=mask)
            tl.store(part_ptr + offs_t, others, mask=flagged)
            if WITH_ENTROPY:
                tl.store(part_ptr + plane + offs_t, sum_ex, mask=flagged)


@triton.jit
def _replace_sums_kernel(
    part_ptr, label_logit_ptr, max_ptr,  # in:  [pieces, K, N, T], [T], [T] fp32
    sums_ptr,  # out: [K, T] fp32, only flagged rows
    pieces, N, T,
    ABOVE: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    flagged, _ = _flagged_rows(label_logit_ptr, max_ptr, offs_t, T, ABOVE)
    if tl.max(flagged.to(tl.int32), axis=0) > 0:
        for k in tl.static_range(K):
            row_sum = tl.zeros((BLOCK_T,), tl.float32)
            for start in range(0, pieces * N, BLOCK_N):
                n = start + tl.arange(0, BLOCK_N)
                row = (n // N * K + k) * N + n % N
                cells = row.to(tl.int64)[:, None] * T + offs_t[None, :]
                mask = (n < pieces * N)[:, None] & flagged[None, :]
                row_sum += tl.sum(tl.load(part_ptr + cells, mask=mask, other=0.0), axis=0)
            tl.store(sums_ptr + k * T + offs_t, row_sum, mask=flagged)


def rescue(
    logits: ShardLogits,
    label_logit: Tensor,
    others_max: Tensor,
    sums: Tensor,
    *,
    cache: ColumnCache,
    with_entropy: bool,
) -> None:
    """Replace the sums [k, T] of ``linear_stats`` where they overflow, see ``pick_reference``.

    ``others_max`` is the maximum over all ranks. The rescued rows of sums and of the cache are
    relative to it; the sum of ``z - label_logit`` does not depend on the reference and stays.
    """
    T, V = logits.T, logits.V
    if T == 0 or V == 0:
        return
    k = 1 + with_entropy
    pieces = list(cache.walk(V, V, V))
    most = MAX_PART_BYTES // (4 * k * T * len(pieces))
    # By pointers: descriptors would cost the host more, call by call, than they save here.
    launches = [tile_launch(logits.columns(*piece[:2]), pointers=True) for piece in pieces]
    programs = max(1, min(launches[0].programs, most, *(launch.num_v for launch in launches)))
    part = sums.new_empty(len(pieces), k, programs, T)
    for i, (start, end, window) in enumerate(pieces):
        launch = launches[i]
        _rescue_kernel[(programs,)](
            *launch.operands(), logits.labels,
            label_logit, others_max,
            part[i],
            window,
            T, end - start, logits.H,
            *launch.strides(), 0 if window is None else window.stride(0),
            logits.vocab_start_index + start, *launch.scalars(),
            ABOVE=RESCUE_ABOVE,
            WITH_ENTROPY=with_entropy,
            HAS_CACHE=window is not None,
            EVEN_V=(end - start) % launch.config.BLOCK_V == 0,
            BLOCK_SCAN=2048,
            **launch.constexprs(),
        )  # fmt: skip
    _replace_sums_kernel[(-(-T // 128),)](
        part, label_logit, others_max,
        sums,
        len(pieces), programs, T,
        ABOVE=RESCUE_ABOVE, K=k, BLOCK_N=32, BLOCK_T=128,
    )  # fmt: skip
