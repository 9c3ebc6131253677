"""The sum or mean of token losses: one program adds them all, always in one order.  T = tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm(labels_ptr, token_weight_ptr, T, ignore_index, BLOCK_T: tl.constexpr):
    """The sum of counted tokens' weights, or 1 if all are 0."""
    weights = tl.zeros((BLOCK_T,), tl.float32)
    nonzero = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, T, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        counted = tl.load(labels_ptr + offs_t, mask=offs_t < T, other=ignore_index) != ignore_index
        weight = tl.full((BLOCK_T,), 1.0, tl.float32)
        if token_weight_ptr is not None:
            weight = tl.load(token_weight_ptr + offs_t, mask=offs_t < T, other=0.0)
        weight = tl.where(counted, weight, 0.0)
        weights += weight
        nonzero |= (weight != 0.0).to(tl.int32)
    norm = tl.sum(weights, axis=0)
    return tl.where(tl.max(nonzero, axis=0) > 0, norm, 1.0)


@triton.jit(do_not_specialize=["T"])
def _loss_norm_kernel(
    labels_ptr, token_weight_ptr,  # in:  [T] int64, [T] fp32
    norm_ptr,  # out: [] fp32
    T,
    ignore_index,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    tl.store(norm_ptr, _norm(labels_ptr, token_weight_ptr, T, ignore_index, BLOCK_T))


@triton.jit(do_not_specialize=["T"])
def _reduce_loss_kernel(
    loss_ptr, labels_ptr, token_weight_ptr,  # in:  [T] fp32, int64, fp32
    norm_ptr,  # in, or with labels out: [] fp32
    total_ptr,  # out: [] fp32
    T,
    ignore_index,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    losses = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, T, BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        losses += tl.load(loss_ptr + offs_t, mask=offs_t < T, other=0.0)
    total = tl.sum(losses, axis=0)
    if labels_ptr is not None:
        norm = _norm(labels_ptr, token_weight_ptr, T, ignore_index, BLOCK_T)
        tl.store(norm_ptr, norm)
        total /= norm
    elif norm_ptr is not None:
        total /= tl.load(norm_ptr)
    tl.store(total_ptr, total)


def loss_norm(
    labels: Tensor, token_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return what a mean divides by, a scalar: the sum of counted tokens' weights, 1 if all are 0.

    labels are [T] int64, token_weight [T] fp32, None is 1. Adds in fp32; dtype is the result's.
    """
    norm = torch.empty((), dtype=dtype, device=labels.device)
    _loss_norm_kernel[(1,)](
        labels, token_weight,
        norm,
        labels.shape[0],
        ignore_index,
        BLOCK_T=2048, num_warps=8,
    )  # fmt: skip
    return norm


def reduce_loss(loss: Tensor, norm: Tensor | None) -> Tensor:
    """Return ``loss.sum() / norm``, a scalar; loss is [T], norm a scalar, None is 1."""
    return _reduced(loss, None, None, norm, 0)


def mean_loss(
    loss: Tensor, labels: Tensor, token_weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return ``reduce_loss(loss, norm)`` and ``norm = loss_norm(...)``, by one launch."""
    norm = loss.new_empty(())
    return _reduced(loss, labels, token_weight, norm, ignore_index), norm


def _reduced(
    loss: Tensor, labels: Tensor | None, token_weight: Tensor | None, norm: Tensor | None,
    ignore_index: int,
) -> Tensor:  # fmt: skip
    total = loss.new_empty(())
    _reduce_loss_kernel[(1,)](
        loss, labels, token_weight,
        norm,
        total,
        loss.shape[0],
        ignore_index,
        BLOCK_T=2048, num_warps=8,
    )  # fmt: skip
    return total
