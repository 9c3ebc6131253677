"""A tile of logits in a kernel.  T = tokens, V = rows here, H = hidden size."""

import triton
import triton.language as tl

from flce_dist.kernels.primitives import dot, load_tile, softcap_tanh


@triton.jit
def inverse_temperatures(scalars, offs_t, mask_t):
    """Those of a tile's tokens, [BLOCK_T, 1]; 1 without any: the compiler drops such a factor."""
    inverse_temperature_ptr = scalars.inverse_temperature
    if inverse_temperature_ptr is None:
        return 1.0
    else:
        return tl.load(inverse_temperature_ptr + offs_t, mask=mask_t, other=1.0)[:, None]


@triton.jit
def logits_tile(
    hidden, weight, bias_ptr,
    start_t, start_v, T, V, H,
    strides, scalars,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Logits of one tile in fp32; undefined beyond T and V. The matrices are descriptors if TMA."""
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h = strides
    offs_t = start_t + tl.arange(0, BLOCK_T)
    inverse = inverse_temperatures(scalars, offs_t, offs_t < T)  # the GEMM hides the latency
    acc = tl.zeros((BLOCK_T, BLOCK_V), dtype=tl.float32)
    for start_h in tl.range(0, H, BLOCK_H):
        h = load_tile(
            hidden, start_t, start_h, T, H, stride_hidden_t, stride_hidden_h, BLOCK_T, BLOCK_H, TMA
        )
        w = load_tile(
            weight, start_v, start_h, V, H, stride_weight_v, stride_weight_h, BLOCK_V, BLOCK_H, TMA
        )
        acc = dot(h, w.T, acc)
    return logits_of(acc, bias_ptr, start_v, V, scalars, inverse, BLOCK_V)


@triton.jit
def logits_of(acc, bias_ptr, start_v, V, scalars, inverse_temperature, BLOCK_V: tl.constexpr):
    """Logits [BLOCK_T, BLOCK_V] from products ``acc`` of hidden and weight."""
    logit_scale = scalars.logit_scale
    softcap = scalars.softcap
    z = acc * logit_scale
    if bias_ptr is not None:
        offs_v = start_v + tl.arange(0, BLOCK_V)
        z += tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)[None, :]
    if softcap is not None:
        z = softcap_tanh(z, softcap)
    return z * inverse_temperature


@triton.jit
def label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index):
    """Return ``(column, counted)``: the label's column here, -1 if it has none; not ignored."""
    labels = tl.load(labels_ptr + offs_t, mask=offs_t < T, other=ignore_index)
    counted = labels != ignore_index
    column = labels - vocab_start_index
    column = tl.where((column >= 0) & (column < V) & counted, column, -1)
    return column.to(tl.int32), counted


@triton.jit
def other_columns(x, column, offs_v, V, EVEN_V: tl.constexpr):
    """x [BLOCK_T, BLOCK_V], but -inf in each token's ``column`` and, unless EVEN_V, beyond V."""
    # Each operation of the epilogue costs about 0.4 % of a tile at H = 4096.
    x = tl.where(offs_v[None, :] == column[:, None], -float("inf"), x)
    if not EVEN_V:
        x += tl.where(offs_v < V, 0.0, -float("inf"))[None, :]
    return x
