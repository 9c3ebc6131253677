"""The usual way to cache exponentials, as a peer: relative to each tile's maximum.

What ``kernels.linear_stats`` does relative to the label's logit, in one pass, takes two here: the
GEMM's epilogue knows the maximum of its own tile only, so a second pass brings what was stored
to the row's log-sum-exp and subtracts 1 at the label. Tiles, pipeline and GEMMs are the same, so
that the difference is the form's. T = tokens, V = vocabulary rows, H = hidden size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.launching import tile_launch
from flce_dist.kernels.primitives import cast, exp, logits_tile, store_tile, tile_coordinates
from flce_dist.kernels.shard_logits import ShardLogits

_PASS_V = 2048  # columns of one program of the second pass, whole tiles


@triton.jit
def _tile_max_kernel(
    hidden, weight, labels_ptr,  # in:  [T, H], [V, H], [T] int64
    cache,  # out: [T, V]
    max_ptr, sum_ptr, label_logit_ptr,  # out: [num_v, T], [num_v, T], [T] fp32
    T, V, H,
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h, stride_cache_t,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP_T: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    num_t, num_v = tl.cdiv(T, BLOCK_T), tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), num_t * num_v, tl.num_programs(0), flatten=True):
        pid_t, pid_v = tile_coordinates(tile, num_t, num_v, GROUP_T)
        start_t, start_v = pid_t * BLOCK_T, pid_v * BLOCK_V
        offs_t = start_t + tl.arange(0, BLOCK_T)
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask_t = offs_t < T
        label = tl.load(labels_ptr + offs_t, mask=mask_t, other=-1).to(tl.int32)
        z = logits_tile(
            hidden, weight, None, start_t, start_v, T, V, H,
            stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h,
            1.0, 1.0, False, False, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip
        here = (label >= start_v) & (label < start_v + BLOCK_V)
        label_logit = tl.sum(tl.where(offs_v[None, :] == label[:, None], z, 0.0), axis=1)
        tl.store(label_logit_ptr + offs_t, label_logit, mask=mask_t & here)
        z += tl.where(offs_v < V, 0.0, -float("inf"))[None, :]
        row_max = tl.max(z, axis=1)
        e = exp(z - row_max[:, None])
        row = pid_v.to(tl.int64) * T + offs_t
        tl.store(max_ptr + row, row_max, mask=mask_t)
        tl.store(sum_ptr + row, tl.sum(e, axis=1), mask=mask_t)
        store_tile(cache, e, start_t, start_v, T, V, stride_cache_t, BLOCK_T, BLOCK_V, TMA)


@triton.jit
def _softmax_gradient_kernel(
    cache_ptr,  # in, out: [T, V]
    max_ptr, lse_ptr, labels_ptr, scale_ptr,  # in:  [num_v, T], [T], [T] int64, [] fp32
    T, V, stride_cache_t,
    BLOCK_V: tl.constexpr, PASS_V: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)  # T * V passes 2**31 at 16k x 128k
    offs_v = tl.program_id(1) * PASS_V + tl.arange(0, PASS_V)
    mask_v = offs_v < V
    row_max = tl.load(max_ptr + (offs_v // BLOCK_V).to(tl.int64) * T + t, mask=mask_v, other=0.0)
    e = tl.load(cache_ptr + t * stride_cache_t + offs_v, mask=mask_v, other=0.0).to(tl.float32)
    p = e * exp(row_max - tl.load(lse_ptr + t))
    p = tl.where(offs_v == tl.load(labels_ptr + t), p - 1.0, p) * tl.load(scale_ptr)
    cells = cache_ptr + t * stride_cache_t + offs_v
    tl.store(cells, cast(p, cache_ptr.dtype.element_ty), mask=mask_v)


class _TileMaxFunction(torch.autograd.Function):
    """Mean loss; saves exponentials [T, V], the tiles' maxima and lse. No ignored tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = ShardLogits(
            hidden=hidden, weight=weight, bias=None, labels=labels, vocab_start_index=0,
            ignore_index=-100, logit_scale=1.0, softcap=None,
        )  # fmt: skip
        T, V = logits.T, logits.V
        cache = hidden.new_empty(T, V)
        launch = tile_launch(logits, cache)
        part = hidden.new_empty(2, launch.num_v, T, dtype=torch.float32)
        label_logit = hidden.new_empty(T, dtype=torch.float32)
        config = launch.config
        matrices = launch.operands()
        _tile_max_kernel[launch.grid](
            matrices[0], matrices[1], labels,
            launch.output(cache),
            part[0], part[1], label_logit,
            T, V, logits.H,
            *launch.strides(), cache.stride(0),
            BLOCK_T=config.BLOCK_T, BLOCK_V=config.BLOCK_V, BLOCK_H=config.BLOCK_H,
            GROUP_T=config.GROUP_T, TMA=launch.tma,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        row_max, row_sum = part
        total_max = row_max.amax(0)
        lse = total_max + ((row_max - total_max).exp() * row_sum).sum(0).log()
        ctx.save_for_backward(hidden, weight, labels, cache, row_max, lse)
        ctx.block_v = config.BLOCK_V
        return (lse - label_logit).mean()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, labels, cache, row_max, lse = ctx.saved_tensors
        T, V = cache.shape
        _softmax_gradient_kernel[(T, -(-V // _PASS_V))](
            cache,
            row_max, lse, labels, dloss / T,
            T, V, cache.stride(0),
            BLOCK_V=ctx.block_v, PASS_V=_PASS_V, num_warps=8,
        )  # fmt: skip
        return cache @ weight, cache.T @ hidden, None


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss; backward may come once."""
    return _TileMaxFunction.apply(hidden, weight, labels)
