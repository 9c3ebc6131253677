"""The two GEMMs of the gradients over the first tokens alone, of which only the device knows how
many: with D [T, V], ``D @ weight`` in their rows, or ``D.T @ hidden`` summed over them.

T = tokens, V = columns of D, H = columns of the result (the hidden size).
"""

import triton.language as tl
from torch import Tensor

from flce_dist.kernels import tuning
from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.launching import has_tma, matrix
from flce_dist.kernels.primitives import (
    add_tile,
    computed,
    dot,
    load_tile,
    store_tile,
    tile_coordinates,
)


@Kernel
def _counted_gemm_kernel(
    d, b,  # in:  [T, V]; [V, H], or [T, H] if SUMS_TOKENS; descriptors if TMA
    count_ptr, row_ptr,  # in:  [] int32, [H] fp32
    out,  # out: [T, H], or [V, H] if SUMS_TOKENS; a descriptor if TMA_OUT
    T, V, H,
    strides,  # of d by t, of b by both, of out by its rows
    SUMS_TOKENS: tl.constexpr, ADDS: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """A program computes every num_programs-th tile [BLOCK_M, BLOCK_N] of the result.

    A last step over tokens reads up to BLOCK_K - 1 rows beyond the count.
    """
    stride_d_t, stride_b, stride_b_h, stride_out = strides
    count = computed(count_ptr, T)
    rows, num_m, K = count, tl.cdiv(count, BLOCK_M), V
    if SUMS_TOKENS:
        rows, num_m, K = V, tl.cdiv(V, BLOCK_M), count
        if ADDS:  # of no tokens the sum is 0, and so is the row
            num_m = tl.where(count > 0, num_m, 0)
    num_n = tl.cdiv(H, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        pid_m, pid_n = tile_coordinates(tile, num_m, num_n, GROUP_M)
        start_m, start_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            if SUMS_TOKENS:
                x = load_tile(d, k, start_m, K, V, stride_d_t, 1, BLOCK_K, BLOCK_M, TMA).T
            else:
                x = load_tile(d, start_m, k, rows, V, stride_d_t, 1, BLOCK_M, BLOCK_K, TMA)
            y = load_tile(b, k, start_n, K, H, stride_b, stride_b_h, BLOCK_K, BLOCK_N, TMA)
            acc = dot(x, y, acc)
        if row_ptr is not None:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            acc += tl.load(row_ptr + offs_n, mask=offs_n < H, other=0.0)[None, :]
        if TMA_OUT:
            store_tile(out, acc, start_m, start_n, rows, H, stride_out, BLOCK_M, BLOCK_N, True)
        else:
            # Not the GEMM's first value: tensor cores truncate, and a sum would drift towards 0.
            add_tile(out, acc, start_m, start_n, rows, H, stride_out, ADDS)


def counted_gemm(
    d: Tensor, b: Tensor, count: Tensor, *,
    sums_tokens: bool, row: Tensor | None = None, out: Tensor, adds: bool,
) -> None:  # fmt: skip
    """Write ``out = d @ b`` in the first ``count`` rows alone, or with ``sums_tokens``
    ``out = d.T @ b + row`` over the first ``count`` rows of d and b; or add it if ``adds``.

    d is [T, V] with a unit last stride, b [V, H] or [T, H] of the same dtype, row [H] fp32 a sum
    over tokens, count a scalar int32. Where a sum over tokens ends, d and b must be 0 up to a whole
    tile of logits, as ``linear_stats``, ``dlogits`` and ``scale_rows`` leave them; beyond it they
    may hold anything. Accumulates in fp32 and rounds once, in out's dtype.
    """
    (T, V), H = d.shape, b.shape[1]
    if d.numel() == 0:
        if not adds:
            out.zero_()
        return
    arch, programs = tuning.device_arch(d.device)
    # That of large logits: no step over tokens is longer than any tile of logits.
    config = tuning.TILES[arch, d.element_size()]
    BLOCK_M, BLOCK_N, BLOCK_K = config.BLOCK_T, config.BLOCK_V, config.BLOCK_H
    tma = has_tma(arch, d, b)
    # A tile of fp32 would take the shared memory of the operands' stages.
    tma_out = tma and out.dtype == d.dtype and not adds and has_tma(arch, out)
    tiles = -(-len(out) // BLOCK_M) * -(-H // BLOCK_N)
    _counted_gemm_kernel[(min(programs, tiles),)](
        matrix(d, (BLOCK_K, BLOCK_M) if sums_tokens else (BLOCK_M, BLOCK_K), tma),
        matrix(b, (BLOCK_K, BLOCK_N), tma),
        count, row,
        matrix(out, (BLOCK_M, BLOCK_N), tma_out),
        T, V, H,
        (d.stride(0), *b.stride(), out.stride(0)),
        SUMS_TOKENS=sums_tokens, ADDS=adds, TMA=tma, TMA_OUT=tma_out,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=config.GROUP_T,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
