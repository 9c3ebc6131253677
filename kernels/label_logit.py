"""The logit of each token's own label.  T = tokens, V = vocabulary rows here, H = hidden size."""

from functools import partial

import triton.language as tl
from torch import Tensor

from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.primitives import label_columns, softcap_tanh
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.tuning import next_power_of_2


@partial(Kernel, debug=True)  # for the assertion
def _label_logit_kernel(
    hidden_ptr, weight_ptr, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64
    label_logit_ptr,  # out: [T] fp32
    T, V, H,
    strides,  # the tuples are those of ShardLogits
    vocab_start_index, scalars, vocab_size,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program computes one token."""
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h = strides
    ignore_index, logit_scale, softcap, inverse_temperature_ptr, _ = scalars
    t = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + t)
    tl.device_assert(
        ((label >= 0) & (label < vocab_size)) | (label == ignore_index),
        "labels must be within [0, vocab_size) or ignore_index",
    )
    column, _ = label_columns(labels_ptr, t, T, V, vocab_start_index, ignore_index)
    z = 0.0
    if column >= 0:  # else the label is another rank's, or ignored
        hidden_ptr += t * stride_hidden_t
        weight_ptr += column.to(tl.int64) * stride_weight_v
        acc = tl.zeros((BLOCK_H,), dtype=tl.float32)
        for start_h in range(0, H, BLOCK_H):
            # H * V passes 2**31 at 8k x 262k: the stride along H of a column-major weight is V.
            offs_h = start_h + tl.arange(0, BLOCK_H).to(tl.int64)
            mask_h = offs_h < H
            h = tl.load(hidden_ptr + offs_h * stride_hidden_h, mask=mask_h, other=0.0)
            w = tl.load(weight_ptr + offs_h * stride_weight_h, mask=mask_h, other=0.0)
            acc += h.to(tl.float32) * w.to(tl.float32)
        z = tl.sum(acc, axis=0) * logit_scale
        if bias_ptr is not None:
            z += tl.load(bias_ptr + column).to(tl.float32)
        if softcap is not None:
            z = softcap_tanh(z, softcap)
        if inverse_temperature_ptr is not None:
            z *= tl.load(inverse_temperature_ptr + t)
    tl.store(label_logit_ptr + t, z)


def label_logit(logits: ShardLogits, *, vocab_size: int, out: Tensor) -> None:
    """Write to out [T] fp32 the logit of each token's label, 0 where it is not owned or ignored.

    A label that is neither below ``vocab_size`` nor ignored fails a device-side assertion, whose
    error arrives with the next synchronisation.
    """
    T, V, H = logits.T, logits.V, logits.H
    if T == 0:
        return
    _label_logit_kernel[(T,)](
        logits.hidden, logits.weight, logits.bias, logits.labels,
        out,
        T, V, H,
        logits.strides,
        logits.vocab_start_index, logits.scalars, vocab_size,
        BLOCK_H=min(1024, next_power_of_2(H)),
    )  # fmt: skip
