"""What filtered gradients need beside D: which tiles are kept, the mass of the others, and the
profile by which it spreads.

T = tokens, V = vocabulary rows here, H = hidden size; a tile of ``tiles.py`` is TILE_T
tokens by TILE_V rows, J = tiles of rows. The statistics kernel's tiles are BLOCK_V columns wide,
which divides TILE_V.
"""

import torch
import triton.language as tl
from torch import Tensor

from flce_dist.kernels import tuning
from flce_dist.kernels.filtered.tiles import TILE_T, TILE_V, tile_grid
from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.launching import tile_launch
from flce_dist.kernels.primitives import (
    cast,
    exp,
    first_reference,
    label_columns,
    logits_tile,
)
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss import log_total_of
from flce_dist.kernels.token_loss_formulas import TokenStats
from flce_dist.kernels.tuning import next_power_of_2

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@Kernel
def _kept_tiles_kernel(
    stats_ptr,  # in:  [2, J * STATS, T] fp32, maxima and sums of the statistics kernel's tiles
    labels_ptr,  # in:  [T] int64, global ids
    label_logit_ptr, reference_ptr, others_ptr,  # in:  [T] fp32 each
    kept_ptr, mass_ptr,  # out: [blocks, J] uint8, [J, T]
    T, V, J, num_stats,
    vocab_start_index, ignore_index, eps,
    STATS: tl.constexpr, TILE_T: tl.constexpr, TILE_V: tl.constexpr, BLOCK_J: tl.constexpr,
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
    tl.store(kept_ptr + tl.program_id(0) * J + offs_j, kept.to(tl.uint8), mask=offs_j < J)
    left_out = counted[None, :] & (kept == 0)[:, None]
    mass = cast(tl.where(left_out, mass, 0.0), mass_ptr.dtype.element_ty)
    offs = offs_j.to(tl.int64)[:, None] * T + offs_t[None, :]
    tl.store(mass_ptr + offs, mass, mask=(offs_j < J)[:, None] & mask_t[None, :])


@Kernel
def _profile_kernel(
    hidden, weight, bias_ptr,  # in:  [N, H] (the sample), [V, H], [V]
    sample_ptr, lse_ptr, kept_ptr,  # in:  [N] int64, [T] fp32, [blocks, J] uint8
    total_ptr,  # out: [V] fp32
    N, V, H, J,
    strides, scalars,  # of ShardLogits
    TILE_T: tl.constexpr, TILE_V: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program sums probabilities over the tokens of the sample whose tile is not kept."""
    start_v = tl.program_id(0) * BLOCK_V
    total = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, N, BLOCK_T):
        offs = start + tl.arange(0, BLOCK_T)
        offs_t = tl.load(sample_ptr + offs, mask=offs < N, other=-1)
        lse = tl.load(lse_ptr + offs_t, mask=offs_t >= 0, other=0.0)
        tiles = kept_ptr + offs_t // TILE_T * J + start_v // TILE_V
        left_out = tl.load(tiles, mask=offs_t >= 0, other=1) == 0
        z = logits_tile(
            hidden, weight, bias_ptr, start, start_v, N, V, H,
            strides, scalars, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip
        p = exp(tl.where(left_out[:, None], z - lse[:, None], -float("inf")))
        total += tl.sum(p, axis=0)
    offs_v = start_v + tl.arange(0, BLOCK_V)
    tl.store(total_ptr + offs_v, total, mask=offs_v < V)


@Kernel
def _normalise_kernel(
    bias_ptr,  # in:  [V]
    q_ptr,  # in and out: [V] fp32
    V,
    TILE_V: tl.constexpr,
):  # fmt: skip
    """A program divides a tile of q by its sum; if that is 0, all rows not banned share equally."""
    offs_v = tl.program_id(0) * TILE_V + tl.arange(0, TILE_V)
    q = tl.load(q_ptr + offs_v, mask=offs_v < V, other=0.0)
    even = tl.where(offs_v < V, 1.0, 0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
        even = tl.where(bias == -float("inf"), 0.0, even)
    q = tl.where(tl.sum(q, axis=0) > 0, q, even)
    q /= tl.maximum(tl.sum(q, axis=0), _TINY)
    tl.store(q_ptr + offs_v, q, mask=offs_v < V)


@Kernel
def _tile_means_kernel(
    q_ptr, weight_ptr,  # in:  [V] fp32, [V, H]
    out_ptr,  # out: [J, H]
    V, H,
    stride_weight_v, stride_weight_h,
    TILE_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program sums BLOCK_H columns of a tile's rows, all loaded at once."""
    j = tl.program_id(1)
    offs_h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_v = j * TILE_V + tl.arange(0, TILE_V)
    offs = offs_v.to(tl.int64)[:, None] * stride_weight_v  # V * H passes 2**31 at 524k x 4k
    offs += offs_h.to(tl.int64)[None, :] * stride_weight_h
    mask = (offs_v < V)[:, None] & (offs_h < H)[None, :]
    rows = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + offs_v, mask=offs_v < V, other=0.0)
    mean = cast(tl.sum(q[:, None] * rows, axis=0), out_ptr.dtype.element_ty)
    tl.store(out_ptr + j.to(tl.int64) * H + offs_h, mean, mask=offs_h < H)


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
    logits: ShardLogits, tiles: Tensor, stats: TokenStats, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``kept`` [blocks, J] bool, and ``mass`` [J, T] in hidden's dtype.

    ``tiles`` holds what ``linear_stats`` left there. A tile is kept if it holds the label of one of
    its counted tokens, or if one of them has a probability of ``eps`` or more in it; or if a mass
    is not finite, as only tokens can have it that were rescued. The mass is each token's
    probability in a tile that is not kept; in kept tiles and for ignored tokens it is 0.
    """
    T, V = logits.T, logits.V
    blocks, J = tile_grid(T, V)
    kept = torch.empty(blocks, J, dtype=torch.bool, device=tiles.device)
    mass = logits.hidden.new_empty(J, T)
    if T == 0 or V == 0:
        return kept, mass
    BLOCK_J = 16
    _kept_tiles_kernel[(blocks, -(-J // BLOCK_J))](
        tiles,
        logits.labels,
        stats.label_logit, stats.reference, stats.others,
        kept.view(torch.uint8), mass,
        T, V, J, tiles.shape[1],
        logits.vocab_start_index, logits.ignore_index, eps,
        STATS=TILE_V // _stats_columns(logits),
        TILE_T=TILE_T, TILE_V=TILE_V, BLOCK_J=BLOCK_J,
    )  # fmt: skip
    return kept, mass


def tile_profile(logits: ShardLogits, lse: Tensor, kept: Tensor, sample: Tensor) -> Tensor:
    """Return q [V] fp32: how mass spreads inside each tile.

    It is the sum of the probabilities of the tokens ``sample`` [N] int64, none of them ignored,
    where their tile is not kept, divided by its sum over the tile; -1 stands for no token. Where no
    such token has any, rows that no bias of -inf bans share the mass equally. Reads weight once.
    """
    logits = logits._replace(hidden=logits.hidden.index_select(0, sample.clamp_min(0)))
    launch = tile_launch(logits)
    q = lse.new_empty(logits.V)
    _profile_kernel[(launch.num_v,)](
        *launch.operands(logits),
        sample, lse, kept.view(torch.uint8),
        q,
        len(sample), logits.V, logits.H, kept.shape[1],
        logits.strides, logits.scalars,
        TILE_T=TILE_T, TILE_V=TILE_V,
        **launch.listed_constexprs,
    )  # fmt: skip
    _normalise_kernel[(kept.shape[1],)](
        logits.bias,
        q,
        logits.V,
        TILE_V=TILE_V,
    )  # fmt: skip
    return q


def tile_means(q: Tensor, weight: Tensor) -> Tensor:
    """Return [J, H] in weight's dtype: the mean of each tile's rows of weight, weighted by q."""
    V, H = weight.shape
    J = -(-V // TILE_V)
    means = weight.new_empty(J, H)
    BLOCK_H = min(128, next_power_of_2(H))
    _tile_means_kernel[(-(-H // BLOCK_H), J)](
        q, weight,
        means,
        V, H,
        *weight.stride(),
        TILE_V=TILE_V, BLOCK_H=BLOCK_H, num_warps=8,
    )  # fmt: skip
    return means
