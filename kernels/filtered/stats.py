"""Kept tiles, the mass of the others, its profile.  T = tokens, V = rows, J = tiles, H = hidden."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels import tuning
from flce_dist.kernels.filtered import tiles
from flce_dist.kernels.filtered.tile_lists import TILE_T, TILE_V
from flce_dist.kernels.logits.launching import has_tma, matrix
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.logits.tile import inverse_temperatures, label_columns, logits_of
from flce_dist.kernels.primitives import cast, dot, exp, first_reference, load_tile
from flce_dist.kernels.rows.formulas import TokenStats
from flce_dist.kernels.rows.token_loss import log_total_of
from flce_dist.kernels.tuning import next_power_of_2

_SAMPLE = tl.constexpr(tiles.SAMPLE)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit(do_not_specialize=["T"])
def _kept_tiles_kernel(
    stats_ptr,  # in:  [2, J * STATS, T] fp32, maxima and sums of the statistics kernel's tiles
    labels_ptr,  # in:  [T] int64, global ids
    label_logit_ptr, reference_ptr, others_ptr,  # in:  [T] fp32 each
    kept_ptr, mass_ptr,  # out: [blocks, J] bool, [J, T]
    T, V, J, num_stats,
    vocab_start_index, ignore_index, eps,
    STATS: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """A program decides about BLOCK_J tiles of one block of tokens."""
    offs_t = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    offs_j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    mask_t = offs_t < T
    sums_ptr = stats_ptr + tl.cast(num_stats, tl.int64) * T
    column, counted = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
    label_logit = tl.load(label_logit_ptr + offs_t, mask=mask_t, other=0.0)
    reference = tl.load(reference_ptr + offs_t, mask=mask_t, other=0.0)
    others = tl.load(others_ptr + offs_t, mask=mask_t, other=0.0)
    lse = reference + log_total_of(others, label_logit - reference)
    largest = tl.full((BLOCK_J, TILE_T), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_J, TILE_T), tl.float32)
    for i in tl.static_range(STATS):
        n = (offs_j * STATS + i).to(tl.int64)[:, None]  # V / 128 * T passes 2**31 at 262k x 1M
        mask = (n < num_stats) & mask_t[None, :]
        offs = n * T + offs_t[None, :]
        part = tl.load(stats_ptr + offs, mask=mask, other=-float("inf"))
        largest = tl.maximum(largest, part)
        total += tl.load(sums_ptr + offs, mask=mask, other=0.0)
    mass = total * exp(first_reference(label_logit) - lse)[None, :]
    has_label = (column >= 0)[None, :] & (column[None, :] // TILE_V == offs_j[:, None])
    is_finite = mass < float("inf")  # nor is it NaN
    reached = (exp(largest - lse[None, :]) >= eps) | ~is_finite | has_label
    reached = reached & counted[None, :]
    kept = tl.max(reached.to(tl.int32), axis=1)
    tl.store(kept_ptr + tl.program_id(0) * J + offs_j, kept != 0, mask=offs_j < J)
    left_out = counted[None, :] & (kept == 0)[:, None]
    mass = cast(tl.where(left_out, mass, 0.0), mass_ptr.dtype.element_ty)
    offs = offs_j.to(tl.int64)[:, None] * T + offs_t[None, :]
    tl.store(mass_ptr + offs, mass, mask=(offs_j < J)[:, None] & mask_t[None, :])


@triton.jit
def _profile_kernel(
    hidden_ptr, weight, bias_ptr,  # in:  [T, H], [V, H] (a descriptor if TMA), [V]
    sample_ptr, lse_ptr, kept_ptr,  # in:  [SAMPLE] int64, [T] fp32, [blocks, J] bool
    total_ptr,  # out: [V] fp32
    V, H,
    strides, scalars,  # of ShardLogits
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program sums probabilities over the tokens of the sample whose tile is not kept."""
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h = strides
    start_v = tl.program_id(0) * BLOCK_V
    total = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, _SAMPLE, BLOCK_T):
        offs_t = tl.load(sample_ptr + start + tl.arange(0, BLOCK_T))
        is_token = offs_t >= 0
        acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for start_h in tl.range(0, H, BLOCK_H):
            offs_h = start_h + tl.arange(0, BLOCK_H).to(tl.int64)
            h = tl.load(
                hidden_ptr + offs_t[:, None] * stride_hidden_t + offs_h[None, :] * stride_hidden_h,
                mask=is_token[:, None] & (offs_h < H)[None, :],
                other=0.0,
            )
            w = load_tile(
                weight, start_v, start_h, V, H, stride_weight_v, stride_weight_h,
                BLOCK_V, BLOCK_H, TMA,
            )  # fmt: skip
            acc = dot(h, w.T, acc)
        inverse = inverse_temperatures(scalars, offs_t, is_token)
        z = logits_of(acc, bias_ptr, start_v, V, scalars, inverse, BLOCK_V)
        lse = tl.load(lse_ptr + offs_t, mask=is_token, other=0.0)
        tile = kept_ptr + offs_t // TILE_T * tl.cdiv(V, TILE_V) + start_v // TILE_V
        left_out = tl.load(tile, mask=is_token, other=1) == 0
        p = exp(tl.where(left_out[:, None], z - lse[:, None], -float("inf")))
        total += tl.sum(p, axis=0)
    offs_v = start_v + tl.arange(0, BLOCK_V)
    tl.store(total_ptr + offs_v, total, mask=offs_v < V)


@triton.jit(do_not_specialize=["T"])
def _rank_one_kernel(
    total_ptr, bias_ptr, weight_ptr,  # in:  [V] fp32, [V], [V, H]
    mass_ptr, scale_ptr,  # in:  [J, T], [T] fp32
    q_ptr, means_ptr, scaled_ptr,  # out: [V] fp32, [J, H], [J, T]
    T, V, H,
    stride_weight_v, stride_weight_h,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program sums BLOCK_H columns of a tile's rows, loaded at once, and scales some masses."""
    j = tl.program_id(1)
    offs_v = j * TILE_V + tl.arange(0, TILE_V)
    total = tl.load(total_ptr + offs_v, mask=offs_v < V, other=0.0)
    even = tl.where(offs_v < V, 1.0, 0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
        even = tl.where(bias == -float("inf"), 0.0, even)
    total = tl.where(tl.sum(total, axis=0) > 0, total, even)
    q = total / tl.maximum(tl.sum(total, axis=0), _TINY)
    if tl.program_id(0) == 0:
        tl.store(q_ptr + offs_v, q, mask=offs_v < V)
    if means_ptr is not None:
        offs_h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
        offs = offs_v.to(tl.int64)[:, None] * stride_weight_v  # V * H passes 2**31 at 524k x 4k
        offs += offs_h.to(tl.int64)[None, :] * stride_weight_h
        mask = (offs_v < V)[:, None] & (offs_h < H)[None, :]
        rows = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        mean = cast(tl.sum(q[:, None] * rows, axis=0), means_ptr.dtype.element_ty)
        tl.store(means_ptr + j.to(tl.int64) * H + offs_h, mean, mask=offs_h < H)
    if scale_ptr is not None:
        for start in range(tl.program_id(0) * BLOCK_T, T, tl.num_programs(0) * BLOCK_T):
            offs_t = start + tl.arange(0, BLOCK_T)
            place = j.to(tl.int64) * T + offs_t
            mass = tl.load(mass_ptr + place, mask=offs_t < T, other=0.0).to(tl.float32)
            mass *= tl.load(scale_ptr + offs_t, mask=offs_t < T, other=0.0)
            tl.store(scaled_ptr + place, cast(mass, scaled_ptr.dtype.element_ty), mask=offs_t < T)


def new_tile_stats(logits: ShardLogits) -> Tensor:
    """Return uninitialised [2, n, T] fp32 for the maxima and sums of the tiles of the kernel of
    ``linear_stats``, which are those of ``tiles.py`` or divide them.
    """
    columns = _stats_columns(logits)
    return logits.hidden.new_empty(2, -(-logits.V // columns), logits.T, dtype=torch.float32)


def _stats_columns(logits: ShardLogits) -> int:
    """Columns of a tile of the statistics kernel, the same for any number of tokens."""
    arch, _ = tuning.device_arch(logits.hidden.device)
    return tuning.tile_config(arch, logits.hidden.element_size(), logits.T, stores=False).BLOCK_V


def kept_tiles(
    logits: ShardLogits, tile_stats: Tensor, stats: TokenStats, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``kept`` [blocks, J] bool, and ``mass`` [J, T] in hidden's dtype.

    ``tile_stats`` is from ``linear_stats``. A tile is kept if it holds the label of a counted
    token, or such a token's probability of ``eps`` or more, or a mass that is not finite, as only
    rescued tokens have. In kept tiles and for ignored tokens the mass is 0.
    """
    T = logits.T
    V = logits.V
    blocks, J = tiles.tile_grid(T, V)
    kept = logits.hidden.new_empty(blocks, J, dtype=torch.bool)
    mass = logits.hidden.new_empty(J, T)
    if T == 0 or V == 0:
        return kept, mass
    BLOCK_J = 16
    _kept_tiles_kernel[(blocks, -(-J // BLOCK_J))](
        tile_stats,
        logits.labels,
        stats.label_logit, stats.reference, stats.others,
        kept, mass,
        T, V, J, tile_stats.shape[1],
        logits.vocab_start_index, logits.ignore_index, eps,
        STATS=tiles.TILE_V // _stats_columns(logits), BLOCK_J=BLOCK_J,
    )  # fmt: skip
    return kept, mass


def tile_profile(logits: ShardLogits, lse: Tensor, kept: Tensor, sample: Tensor) -> Tensor:
    """Return [V] fp32: the sum of the probabilities of the tokens ``sample`` (``profile_sample``)
    where their tile is not kept. Reads weight once.
    """
    arch, _ = tuning.device_arch(logits.hidden.device)
    itemsize = logits.hidden.element_size()
    config = tuning.tile_config(arch, itemsize, tiles.SAMPLE, stores=False)
    tma = has_tma(arch, logits.weight)
    total = lse.new_empty(logits.V)
    _profile_kernel[(-(-logits.V // config.BLOCK_V),)](
        logits.hidden,
        matrix(logits.weight, (config.BLOCK_V, config.BLOCK_H), tma),
        logits.bias,
        sample, lse, kept,
        total,
        logits.V, logits.H,
        logits.strides, logits.scalars,
        TMA=tma,
        BLOCK_T=config.BLOCK_T, BLOCK_V=config.BLOCK_V, BLOCK_H=config.BLOCK_H,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return total


def rank_one(
    logits: ShardLogits, total: Tensor, mass: Tensor, scale: Tensor | None, *, with_means: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return q [V] fp32, rows of weight weighted by it [J, H], if asked for, and scaled ``mass``.

    q is ``total`` (``tile_profile``) divided by its sum over the tile. Where that is 0, rows that
    no bias of -inf bans share the mass equally. scale is [T] fp32, None is 1.
    """
    J, T = mass.shape
    H = logits.H
    q = torch.empty_like(total)
    means = logits.weight.new_empty(J, H) if with_means else None
    scaled = mass if scale is None else torch.empty_like(mass)
    BLOCK_H = min(128, next_power_of_2(H))
    _rank_one_kernel[(-(-H // BLOCK_H), J)](
        total, logits.bias, logits.weight,
        mass, scale,
        q, means, scaled,
        T, logits.V, H,
        *logits.weight.stride(),
        BLOCK_T=1024, BLOCK_H=BLOCK_H, num_warps=8,
    )  # fmt: skip
    return q, means, scaled
