"""The logit of each token's label, with the bits that a tile of logits has at that place.

T = tokens, V = vocabulary rows here, H = hidden size.

A rank among all logits counts equal ones, and a dot product rounds otherwise than a tile does. So
this is the diagonal of small tiles: the tokens of a block and the rows of their labels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.logits.launching import tile_launch
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.logits.tile import label_columns
from flce_dist.kernels.primitives import dot, softcap_tanh

_BLOCK = 64  # tokens of a program: Hopper's tensor-core instruction takes no fewer


@triton.jit(do_not_specialize=["T"], debug=True)  # for the assertion
def _label_tiles_kernel(
    hidden_ptr, weight_ptr, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 global ids
    out_ptr,  # out: [T] fp32
    T, V, H,
    strides,  # the tuples are those of ShardLogits
    vocab_start_index, scalars, vocab_size,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program computes the logits of BLOCK_T tokens at all their labels, and keeps each own."""
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h = strides
    ignore_index = scalars.ignore_index
    inverse_temperature_ptr = scalars.inverse_temperature
    softcap = scalars.softcap
    offs = tl.arange(0, BLOCK_T)
    offs_t = tl.program_id(0) * BLOCK_T + offs
    label = tl.load(labels_ptr + offs_t, mask=offs_t < T, other=ignore_index)
    tl.device_assert(
        ((label >= 0) & (label < vocab_size)) | (label == ignore_index),
        "labels must be within [0, vocab_size) or ignore_index",
    )
    column, _ = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
    is_here = column >= 0
    hidden_ptr += offs_t.to(tl.int64)[:, None] * stride_hidden_t
    weight_ptr += column.to(tl.int64)[:, None] * stride_weight_v
    acc = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for start_h in tl.range(0, H, BLOCK_H):
        offs_h = start_h + tl.arange(0, BLOCK_H).to(tl.int64)
        mask = is_here[:, None] & (offs_h < H)[None, :]
        h = tl.load(hidden_ptr + offs_h[None, :] * stride_hidden_h, mask=mask, other=0.0)
        w = tl.load(weight_ptr + offs_h[None, :] * stride_weight_h, mask=mask, other=0.0)
        acc = dot(h, w.T, acc)
    z = tl.sum(tl.where(offs[:, None] == offs[None, :], acc, 0.0), axis=1) * scalars.logit_scale
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column, mask=is_here, other=0.0).to(tl.float32)
    if softcap is not None:
        z = softcap_tanh(z, softcap)
    if inverse_temperature_ptr is not None:
        z *= tl.load(inverse_temperature_ptr + offs_t, mask=is_here, other=1.0)
    tl.store(out_ptr + offs_t, tl.where(is_here, z, 0.0), mask=offs_t < T)


def label_logits(logits: ShardLogits, *, vocab_size: int) -> Tensor:
    """Return [T] fp32: the logits of labels that this shard has, and 0 elsewhere and if ignored.

    Their bits are those of the tile in which ``best_of_shard`` computes them. A label that is
    neither below ``vocab_size`` nor ignored fails a device-side assertion, whose error arrives with
    the next synchronisation.
    """
    T = logits.T
    out = torch.empty(T, dtype=torch.float32, device=logits.labels.device)
    if T:
        config = tile_launch(logits, pointers=True).config
        BLOCK_T = min(_BLOCK, config.BLOCK_T)
        _label_tiles_kernel[(-(-T // BLOCK_T),)](
            logits.hidden, logits.weight, logits.bias, logits.labels,
            out,
            T, logits.V, logits.H,
            logits.strides,
            logits.vocab_start_index, logits.scalars, vocab_size,
            BLOCK_T=BLOCK_T, BLOCK_H=config.BLOCK_H, num_warps=4, sanitize_overflow=False,
        )  # fmt: skip
    return out
