"""Gradients at the ids of tokens: what goes into D, and what makes dhidden.

T = tokens, V = vocabulary rows here, H = hidden size, N = ids of all tokens, W = columns of D.
"""

import triton.language as tl
from torch import Tensor

from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.primitives import cast
from flce_dist.kernels.scores.token_ids import TokenIds
from flce_dist.kernels.tuning import next_power_of_2

_BLOCK_N, _BLOCK_H = 8, 512  # entries and columns of one step, which a program loads at once
_WRITTEN_AT_ONCE = 256  # entries of a program


@Kernel
def _write_named_kernel(
    ids_ptr, token_ptr, value_ptr,  # in:  [N] int64, int64, fp32
    out_ptr,  # out: [T, W], only the named elements
    N, W,
    stride_t,
    vocab_start_index,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program writes BLOCK_N entries; the first of equal ones adds up those after it."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    id = tl.load(ids_ptr + n, mask=n < N, other=-1)
    token = tl.load(token_ptr + n, mask=n < N, other=0)
    column = id - vocab_start_index
    has_before = (n > 0) & (n < N)
    repeats = tl.load(ids_ptr + n - 1, mask=has_before, other=-1) == id
    repeats &= tl.load(token_ptr + n - 1, mask=has_before, other=-1) == token
    is_here = (id >= 0) & (column >= 0) & (column < W) & (repeats == 0)
    value = tl.load(value_ptr + n, mask=is_here, other=0.0)
    more = is_here
    next = n + 1
    while tl.max(more.to(tl.int32), axis=0) > 0:
        more = more & (next < N)
        more = more & (tl.load(ids_ptr + next, mask=more, other=-1) == id)
        more = more & (tl.load(token_ptr + next, mask=more, other=-1) == token)
        value += tl.load(value_ptr + next, mask=more, other=0.0)
        next += 1
    value = cast(value, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_t + column, value, mask=is_here)


def write_named(out: Tensor, ids: TokenIds, value: Tensor, *, vocab_start_index: int) -> None:
    """Write ``out[t, id - vocab_start_index]`` for each token's ids that have a column there.

    out is [T, W]. The element is the sum of the entries that have the id; value is [N] fp32.
    """
    N = len(value)
    if N and out.shape[1]:
        _write_named_kernel[(-(-N // _WRITTEN_AT_ONCE),)](
            ids.ids, ids.token, value,
            out,
            N, out.shape[1],
            out.stride(0),
            vocab_start_index,
            BLOCK_N=_WRITTEN_AT_ONCE,
        )  # fmt: skip


@Kernel
def _dhidden_of_ids_kernel(
    factor_ptr, ids_ptr, offsets_ptr, weight_ptr,  # in:  [N] fp32, [N], [T + 1] int64, [V, H]
    out_ptr,  # out: [T, H]
    V, H,
    stride_weight_v, stride_weight_h, stride_out_t,
    vocab_start_index,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program sums BLOCK_H columns of one token."""
    t = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
    begin, end = tl.load(offsets_ptr + t), tl.load(offsets_ptr + t + 1)
    acc = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        row = tl.load(ids_ptr + n, mask=n < end, other=-1) - vocab_start_index
        is_here = (row >= 0) & (row < V)
        factor = tl.load(factor_ptr + n, mask=is_here, other=0.0)
        w = tl.load(
            weight_ptr + row[:, None] * stride_weight_v + offs_h[None, :] * stride_weight_h,
            mask=is_here[:, None] & (offs_h < H)[None, :], other=0.0,
        )  # fmt: skip
        acc += factor[:, None] * w.to(tl.float32)
    total = cast(tl.sum(acc, axis=0), out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * stride_out_t + offs_h, total, mask=offs_h < H)


def dhidden_of_ids(
    factor: Tensor, ids: TokenIds, weight: Tensor, *, vocab_start_index: int, out: Tensor
) -> None:
    """Write to out [T, H] the sum over a token's entries of factor [N] times rows of weight [V, H].

    Entries whose rows are elsewhere are left out. Accumulates in fp32; out has a unit last stride.
    """
    T, H = out.shape
    BLOCK_H = min(_BLOCK_H, next_power_of_2(H))
    if T:
        _dhidden_of_ids_kernel[(T, -(-H // BLOCK_H))](
            factor, ids.ids, ids.offsets, weight,
            out,
            len(weight), H,
            *weight.stride(), out.stride(0),
            vocab_start_index,
            BLOCK_N=_BLOCK_N, BLOCK_H=BLOCK_H,
        )  # fmt: skip
