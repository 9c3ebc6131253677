"""The two GEMMs of the gradients over the first tokens alone, of which only the device knows how
many: with D [T, V], ``D @ weight`` in their rows, or ``D.T @ hidden`` summed over them.

T = tokens, V = columns of D, H = columns of the result (the hidden size).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels import tuning
from flce_dist.kernels.logits.launching import has_tma, matrix
from flce_dist.kernels.primitives import (
    add_tile,
    computed,
    dot,
    load_tile,
    store_tile,
    tile_coordinates,
)

_SUMMED_ROWS = 8  # of a tile at a time, where its parts are added


@triton.jit
def last_wave(tiles, programs, K, BLOCK_K: tl.constexpr):
    """How many tiles fill whole waves, and into how many parts K of each other tile is cut."""
    full = tiles // programs * programs
    most = tl.cdiv(K, 8 * BLOCK_K)  # shorter parts cost more than they save
    return full, tl.maximum(tl.minimum(programs // tl.maximum(tiles - full, 1), most), 1)


@triton.jit(do_not_specialize=["T"])
def _counted_gemm_kernel(
    d, b,  # in:  [T, V]; [V, H], or [T, H] if SUMS_TOKENS; descriptors if TMA
    count_ptr, row_ptr,  # in:  [] int32, [H] fp32
    out,  # out: [T, H], or [V, H] if SUMS_TOKENS; a descriptor if TMA_OUT
    parts_ptr,  # out: [programs * BLOCK_M, BLOCK_N] fp32, or None
    T, V, H,
    strides,  # of d by t, of b by both, of out by its rows
    SUMS_TOKENS: tl.constexpr, ADDS: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A program computes every num_programs-th tile [BLOCK_M, BLOCK_N] of the result.

    With parts, K of each tile of a last wave that is not full is cut, for all programs to share. A
    last step over tokens reads up to BLOCK_K - 1 rows beyond the count.
    """
    stride_d_t, stride_b, stride_b_h, stride_out = strides
    count = computed(count_ptr, T)
    rows = count
    num_m = tl.cdiv(count, BLOCK_M)
    K = V
    if SUMS_TOKENS:
        rows = V
        num_m = tl.cdiv(V, BLOCK_M)
        K = count
        if ADDS:  # of no tokens the sum is 0, and so is the row
            num_m = tl.where(count > 0, num_m, 0)
    num_n = tl.cdiv(H, BLOCK_N)
    full = num_m * num_n
    splits = 1
    if parts_ptr is not None:
        full, splits = last_wave(num_m * num_n, tl.num_programs(0), K, BLOCK_K)
    length = tl.cdiv(tl.cdiv(K, splits), BLOCK_K) * BLOCK_K
    units = full + (num_m * num_n - full) * splits
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=True):
        tile = unit
        first = 0
        last = K
        if parts_ptr is not None:
            cut = unit - full
            tile = tl.where(cut < 0, unit, full + cut // splits)
            first = tl.where(cut < 0, 0, cut % splits * length)
            last = tl.where(cut < 0, K, tl.minimum(first + length, K))
        pid_m, pid_n = tile_coordinates(tile, num_m, num_n, GROUP_M)
        start_m = pid_m * BLOCK_M
        start_n = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(first, last, BLOCK_K):
            if SUMS_TOKENS:
                x = load_tile(d, k, start_m, K, V, stride_d_t, 1, BLOCK_K, BLOCK_M, TMA).T
            else:
                x = load_tile(d, start_m, k, rows, V, stride_d_t, 1, BLOCK_M, BLOCK_K, TMA)
            y = load_tile(b, k, start_n, K, H, stride_b, stride_b_h, BLOCK_K, BLOCK_N, TMA)
            acc = dot(x, y, acc)
        if row_ptr is not None:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            acc += tl.load(row_ptr + offs_n, mask=offs_n < H, other=0.0)[None, :]
        if parts_ptr is not None and splits > 1 and unit >= full:
            num_parts = tl.num_programs(0) * BLOCK_M
            add_tile(
                parts_ptr, acc, (unit - full) * BLOCK_M, 0, num_parts, BLOCK_N, BLOCK_N, ADDS=False
            )
        elif TMA_OUT:
            store_tile(out, acc, start_m, start_n, rows, H, stride_out, BLOCK_M, BLOCK_N, True)
        else:
            # Not the GEMM's first value: tensor cores truncate, and a sum would drift towards 0.
            add_tile(out, acc, start_m, start_n, rows, H, stride_out, ADDS)


@triton.jit(do_not_specialize=["T"])
def _add_parts_kernel(
    parts_ptr, count_ptr,  # in:  [programs * BLOCK_M, BLOCK_N] fp32, [] int32
    out_ptr,  # out: [T, H]
    T, V, H,
    stride_out,
    programs,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """Write the tiles that were cut along K: the sums of their parts, in order of K.

    A program sums every num_programs-th block of ROWS rows.
    """
    count = computed(count_ptr, T)
    num_m = tl.cdiv(count, BLOCK_M)
    num_n = tl.cdiv(H, BLOCK_N)
    full, splits = last_wave(num_m * num_n, programs, V, BLOCK_K)
    blocks = tl.where(splits > 1, (num_m * num_n - full) * (BLOCK_M // ROWS), 0)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        cut = block // (BLOCK_M // ROWS)
        row = block % (BLOCK_M // ROWS) * ROWS
        offs_row = cut * splits * BLOCK_M + row + tl.arange(0, ROWS)
        ptrs = parts_ptr + offs_row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for part in tl.range(0, splits):
            total += tl.load(ptrs + part * BLOCK_M * BLOCK_N)
        pid_m, pid_n = tile_coordinates(full + cut, num_m, num_n, GROUP_M)
        start_m = pid_m * BLOCK_M + row
        start_n = pid_n * BLOCK_N
        add_tile(out_ptr, total, start_m, start_n, count, H, stride_out, ADDS)


def counted_gemm(
    d: Tensor, b: Tensor, count: Tensor, *,
    sums_tokens: bool, row: Tensor | None = None, out: Tensor, adds: bool,
) -> None:  # fmt: skip
    """Write ``out = d @ b`` in the first ``count`` rows alone, or with ``sums_tokens``
    ``out = d.T @ b + row`` over the first ``count`` rows of d and b; or add it if ``adds``.

    d is [T, V] with a unit last stride, b [V, H] or [T, H] of the same dtype, row [H] fp32 a sum
    over tokens, count a scalar int32. Where a sum over tokens ends, d and b must be 0 up to a whole
    tile of logits, as ``linear_stats``, ``dlogits``, ``pair_dlogits`` and ``scale_rows`` leave
    them; beyond it they may hold anything. Accumulates in fp32 and rounds once, in out's dtype.
    Without ``sums_tokens`` it takes a tile of fp32 for each program, 16.5 MiB on an H100.
    """
    T, V = d.shape
    H = b.shape[1]
    if d.numel() == 0:
        if not adds:
            out.zero_()
        return
    arch, programs = tuning.device_arch(d.device)
    # That of large logits: no step over tokens is longer than any tile of logits.
    config = tuning.TILES[arch, d.element_size()]
    BLOCK_M = config.BLOCK_T
    BLOCK_N = config.BLOCK_V
    BLOCK_K = config.BLOCK_H
    tma = has_tma(arch, d, b)
    # A tile of fp32 would take the shared memory of the operands' stages.
    tma_out = tma and out.dtype == d.dtype and not adds and has_tma(arch, out)
    blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "GROUP_M": config.GROUP_T}
    # Tiles of a sum over tokens are many, so that a last wave does not matter.
    parts = None if sums_tokens else d.new_empty(programs * BLOCK_M, BLOCK_N, dtype=torch.float32)
    _counted_gemm_kernel[(programs,)](
        matrix(d, (BLOCK_K, BLOCK_M) if sums_tokens else (BLOCK_M, BLOCK_K), tma),
        matrix(b, (BLOCK_K, BLOCK_N), tma),
        count, row,
        matrix(out, (BLOCK_M, BLOCK_N), tma_out),
        parts,
        T, V, H,
        (d.stride(0), *b.stride(), out.stride(0)),
        SUMS_TOKENS=sums_tokens, ADDS=adds, TMA=tma, TMA_OUT=tma_out, **blocks,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if parts is not None:
        _add_parts_kernel[(programs,)](
            parts, count, out, T, V, H, out.stride(0), programs, ADDS=adds, ROWS=_SUMMED_ROWS,
            **blocks, num_warps=4,
        )  # fmt: skip
