"""Logits and elements of D of some tokens at one id each: their labels, or ids that are asked for.

N = entries, T = tokens, V = vocabulary rows here, H = hidden size, W = columns of D.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.primitives import cast, softcap_tanh
from flce_dist.kernels.tuning import next_power_of_2

_BLOCK_N = 4  # entries and columns of one step, which a program loads at once
_BLOCK_H = 1024
_WRITTEN_AT_ONCE = 128  # entries of a program


@triton.jit
def _is_new(ids_ptr, token_ptr, n, N, id, token):
    """Whether the entry before has another id or another token, [BLOCK_N]."""
    has_before = (n > 0) & (n < N)
    other_id = tl.load(ids_ptr + n - 1, mask=has_before, other=-1) != id
    return other_id | (tl.load(token_ptr + n - 1, mask=has_before, other=-1) != token)


@triton.jit
def _entries(ids_ptr, token_ptr, N, V, vocab_start_index, ignore_index, BLOCK_N: tl.constexpr):
    """A program's entries: number, id, token, row here, and whether that is of V rows and new."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    id = tl.load(ids_ptr + n, mask=n < N, other=ignore_index)
    token = n
    row = id - vocab_start_index
    is_here = (row >= 0) & (row < V) & (id != ignore_index)
    if token_ptr is not None:
        token = tl.load(token_ptr + n, mask=n < N, other=0)
        is_here &= _is_new(ids_ptr, token_ptr, n, N, id, token)
    return n, id, token, row, is_here


@triton.jit(do_not_specialize=["N"], debug=True)  # for the assertion
def _logits_at_ids_kernel(
    hidden_ptr, weight_ptr, bias_ptr,  # in:  [T, H], [V, H], [V]
    ids_ptr, token_ptr,  # in:  [N] int64 (global ids), [N] int64
    out_ptr,  # out: [N] fp32
    N, V, H,
    strides,  # the tuples are those of ShardLogits
    vocab_start_index, scalars, vocab_size,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_N entries, each in an order of its own: bits do not depend on N."""
    stride_hidden_t, stride_hidden_h, stride_weight_v, stride_weight_h = strides
    ignore_index = scalars.ignore_index
    inverse_temperature_ptr = scalars.inverse_temperature
    softcap = scalars.softcap
    n, id, token, row, is_here = _entries(
        ids_ptr, token_ptr, N, V, vocab_start_index, ignore_index, BLOCK_N
    )
    if token_ptr is None:  # ids are labels
        tl.device_assert(
            ((id >= 0) & (id < vocab_size)) | (id == ignore_index),
            "labels, and ids of scores, must be within [0, vocab_size) or ignored",
        )
    hidden_ptr += token * stride_hidden_t
    weight_ptr += row * stride_weight_v
    acc = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
    end_h = tl.where(tl.max(is_here.to(tl.int32), axis=0) > 0, H, 0)  # 0 if none is to be computed
    for start_h in range(0, end_h, BLOCK_H):
        # H * V passes 2**31 at 8k x 262k: the stride along H of a column-major weight is V.
        offs_h = start_h + tl.arange(0, BLOCK_H).to(tl.int64)
        mask = is_here[:, None] & (offs_h < H)[None, :]
        h = tl.load(hidden_ptr[:, None] + offs_h[None, :] * stride_hidden_h, mask=mask, other=0.0)
        w = tl.load(weight_ptr[:, None] + offs_h[None, :] * stride_weight_h, mask=mask, other=0.0)
        acc += h.to(tl.float32) * w.to(tl.float32)
    z = tl.sum(acc, axis=1) * scalars.logit_scale
    if bias_ptr is not None:
        z += tl.load(bias_ptr + row, mask=is_here, other=0.0).to(tl.float32)
    if softcap is not None:
        z = softcap_tanh(z, softcap)
    if inverse_temperature_ptr is not None:
        counts = (n < N) & (id != ignore_index)
        inverse = tl.load(inverse_temperature_ptr + token, mask=counts, other=1.0)
        tl.device_assert(inverse == inverse, "temperature must be finite and above 0")
        z *= inverse
    tl.store(out_ptr + n, tl.where(is_here, z, 0.0), mask=n < N)


def logits_at_ids(
    logits: ShardLogits, ids: Tensor, token: Tensor | None, *, vocab_size: int
) -> Tensor:
    """Return [N] fp32: the tempered logits of tokens at global ids [N], 0 if ignored or elsewhere.

    Entry n is of token[n], and 0 if it repeats the one before; or of token n, whose label the id is
    then. A label that is neither below ``vocab_size`` nor ignored fails a device-side assertion,
    whose error arrives with the next synchronisation. Reads at most 2 N H elements.
    """
    (N,) = ids.shape
    H = logits.H
    out = torch.empty(N, dtype=torch.float32, device=ids.device)
    if N:
        _logits_at_ids_kernel[(-(-N // _BLOCK_N),)](
            logits.hidden, logits.weight, logits.bias,
            ids, token,
            out,
            N, logits.V, H,
            logits.strides,
            logits.vocab_start_index, logits.scalars, vocab_size,
            BLOCK_N=_BLOCK_N, BLOCK_H=min(_BLOCK_H, next_power_of_2(H)), sanitize_overflow=False,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["N"])
def _write_at_ids_kernel(
    ids_ptr, token_ptr, value_ptr,  # in:  [N] int64 (global ids), [N] int64, [N] fp32
    out_ptr,  # out: [T, W], only these elements
    N, W,
    stride_t,
    vocab_start_index, ignore_index,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program writes BLOCK_N entries."""
    n, _, token, column, is_here = _entries(
        ids_ptr, token_ptr, N, W, vocab_start_index, ignore_index, BLOCK_N
    )
    value = tl.load(value_ptr + n, mask=is_here, other=0.0)
    value = cast(value, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_t + column, value, mask=is_here)


def write_at_ids(
    out: Tensor, ids: Tensor, token: Tensor | None, value: Tensor,
    vocab_start_index: int, ignore_index: int,
) -> None:  # fmt: skip
    """Write ``out[token[n], ids[n] - vocab_start_index] = value[n]`` where that column exists.

    Without ``token`` entry n is of token n. Left out are ignored ids and entries that repeat the
    one before. out is [T, W] of any dtype with a unit last stride, ids [N] global, value [N] fp32.
    """
    (N,) = ids.shape
    W = out.shape[1]
    if N and W:
        _write_at_ids_kernel[(-(-N // _WRITTEN_AT_ONCE),)](
            ids, token, value,
            out,
            N, W,
            out.stride(0),
            vocab_start_index, ignore_index,
            BLOCK_N=_WRITTEN_AT_ONCE,
        )  # fmt: skip
