"""Gradients from factors of ids: dhidden, of each token a sum over its entries, and dweight, of
each id the sum over its entries of factor times hidden. In one order, no atomics.

T = tokens, V = vocabulary rows here, H = hidden size, N = ids of all tokens. For dweight entries
are sorted by id, and a program takes CHUNK of them: whole runs of one id it writes; of a run that
goes beyond the chunk it keeps the part, which a second launch sums: one id everywhere is no slower.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.ids.token_ids import IdEntries, TokenIds
from flce_dist.kernels.primitives import cast
from flce_dist.kernels.tuning import next_power_of_2

CHUNK = 256  # entries of a program; parts take 8 H / CHUNK bytes of each entry
_BLOCK_H = 512  # columns of a program: of dhidden, of dweight
_SUMMED_H = 1024
_PARTS = 8  # that the second launch loads at once
_BLOCK_N = 8  # entries of a token that are loaded at once


@triton.jit
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
    begin = tl.load(offsets_ptr + t)
    end = tl.load(offsets_ptr + t + 1)
    acc = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        row = tl.load(ids_ptr + n, mask=n < end, other=-1) - vocab_start_index
        is_here = (row >= 0) & (row < V)
        factor = tl.load(factor_ptr + n, mask=n < end, other=0.0)
        w = tl.load(
            weight_ptr + row[:, None] * stride_weight_v + offs_h[None, :] * stride_weight_h,
            mask=(is_here & (factor != 0.0))[:, None] & (offs_h < H)[None, :], other=0.0,
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


@triton.jit
def _write(out_ptr, row, total, offs_h, H, stride_out_v, ADDS: tl.constexpr):
    out_ptr += row.to(tl.int64) * stride_out_v + offs_h
    if ADDS:
        total += tl.load(out_ptr, mask=offs_h < H, other=0.0).to(tl.float32)
    tl.store(out_ptr, cast(total, out_ptr.dtype.element_ty), mask=offs_h < H)


@triton.jit
def _entry(ids_ptr, token_ptr, factor_ptr, n, N):
    """The id, the token and the factor of entry n."""
    id = tl.load(ids_ptr + n, mask=n < N, other=-1)
    token = tl.load(token_ptr + n, mask=n < N, other=0)
    return id, token, tl.load(factor_ptr + n, mask=n < N, other=0.0)


@triton.jit(do_not_specialize=["N"])
def _chunk_sums_kernel(
    hidden_ptr, ids_ptr, token_ptr, factor_ptr,  # in:  [T, H]; [N] ids, int64, fp32, by id
    out_ptr, head_ptr, tail_ptr,  # out: [V, H]; [chunks, H] fp32 of runs from before, and beyond
    N, V, H,
    stride_hidden_t, stride_hidden_h, stride_out_v,
    vocab_start_index,
    ADDS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program sums BLOCK_H columns of CHUNK entries; rows load one ahead, their tokens two."""
    chunk = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
    mask_h = offs_h < H
    hidden_ptr += offs_h * stride_hidden_h
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, N)
    before = tl.load(ids_ptr + begin - 1, mask=begin > 0, other=-1)
    id, token, factor = _entry(ids_ptr, token_ptr, factor_ptr, begin, N)
    last = tl.load(ids_ptr + end - 1)
    if (last < vocab_start_index) | (id >= vocab_start_index + V):
        end = begin  # all are other ranks'
    is_here = (id >= vocab_start_index) & (id < vocab_start_index + V)
    h = tl.load(hidden_ptr + token * stride_hidden_t, mask=mask_h & is_here, other=0.0)
    after, token, next_factor = _entry(ids_ptr, token_ptr, factor_ptr, begin + 1, N)
    acc = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for n in range(begin, end):
        next_here = (after >= vocab_start_index) & (after < vocab_start_index + V)
        next_h = tl.load(
            hidden_ptr + token * stride_hidden_t,
            mask=mask_h & next_here & (n + 1 < end), other=0.0,
        )  # fmt: skip
        id_after, token, factor_after = _entry(ids_ptr, token_ptr, factor_ptr, n + 2, N)
        acc += factor * h.to(tl.float32)
        if is_here & ((after != id) | (n == end - 1)):
            if id == before:
                tl.store(head_ptr + chunk * H + offs_h, acc, mask=mask_h)
            elif after == id:
                tl.store(tail_ptr + chunk * H + offs_h, acc, mask=mask_h)
            else:
                _write(out_ptr, id - vocab_start_index, acc, offs_h, H, stride_out_v, ADDS)
        acc = tl.where(after != id, 0.0, acc)
        id = after
        is_here = next_here
        factor = next_factor
        h = next_h
        after = id_after
        next_factor = factor_after


@triton.jit(do_not_specialize=["N"])
def _run_sums_kernel(
    ids_ptr, head_ptr, tail_ptr,  # in:  [N] sorted, [chunks, H] fp32 twice
    out_ptr,  # out: [V, H]
    N, V, H,
    stride_out_v,
    vocab_start_index,
    ADDS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A program sums BLOCK_H columns of the run that begins in a chunk and goes beyond it."""
    chunk = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, N)
    id = tl.load(ids_ptr + end - 1)
    row = id - vocab_start_index
    before = tl.load(ids_ptr + begin - 1, mask=begin > 0, other=-1)
    after = tl.load(ids_ptr + end, mask=end < N, other=-1)
    if (row >= 0) & (row < V) & (after == id) & (before != id):
        total = tl.load(tail_ptr + chunk * H + offs_h, mask=offs_h < H, other=0.0)
        parts = tl.zeros((PARTS, BLOCK_H), dtype=tl.float32)
        next = chunk + 1
        more = True
        while more:
            c = next + tl.arange(0, PARTS)
            is_of_run = tl.load(ids_ptr + c * CHUNK, mask=c * CHUNK < N, other=-1) == id
            parts += tl.load(
                head_ptr + c[:, None] * H + offs_h[None, :],
                mask=is_of_run[:, None] & (offs_h < H)[None, :], other=0.0,
            )  # fmt: skip
            next += PARTS
            more = tl.sum(is_of_run.to(tl.int32), axis=0) == PARTS
        _write(out_ptr, row, total + tl.sum(parts, axis=0), offs_h, H, stride_out_v, ADDS)


def dweight_of_ids(
    entries: IdEntries, hidden: Tensor, *, vocab_start_index: int, out: Tensor, adds: bool
) -> None:
    """Write the rows of out [V, H] that have entries: sums of their factors times hidden [T, H].

    ``adds`` adds to what is there. Accumulates in fp32 and rounds once. out has a unit last stride;
    other rows are left alone.
    """
    V, H = out.shape
    N = len(entries.ids)
    if not N or not V:
        return
    BLOCK_H = min(_SUMMED_H, next_power_of_2(H))
    chunks = -(-N // CHUNK)
    head, tail = entries.factor.new_empty(2, chunks, H)
    grid = chunks, -(-H // BLOCK_H)
    _chunk_sums_kernel[grid](
        hidden, *entries,
        out, head, tail,
        N, V, H,
        *hidden.stride(), out.stride(0),
        vocab_start_index,
        ADDS=adds, CHUNK=CHUNK, BLOCK_H=BLOCK_H, num_warps=2,
    )  # fmt: skip
    _run_sums_kernel[grid](
        entries.ids, head, tail,
        out,
        N, V, H,
        out.stride(0),
        vocab_start_index,
        ADDS=adds, CHUNK=CHUNK, BLOCK_H=BLOCK_H, PARTS=_PARTS,
    )  # fmt: skip
