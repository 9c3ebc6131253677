"""The GEMMs of filtered gradients: what D of the kept tiles adds to the gradients.

T = tokens, V = vocabulary rows here, H = hidden size. ``d`` holds D of one round, packed as
``dlogits.py`` says, so every tile is whole, and only its place is looked up, in the loop over the
shared dimension. There the next entry of a list is loaded one step before it is needed: loaded
where it is used it costs the pipeline of the operands' loads half of its stages.

Blocks are as large as those of the logits. No element is written by two programs.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels import tuning
from flce_dist.kernels.filtered import tiles
from flce_dist.kernels.filtered.tile_lists import TILE_T, TILE_V, TileLists, list_pointers
from flce_dist.kernels.logits.launching import has_tma, matrix
from flce_dist.kernels.primitives import add_tile, dot, load_tile, parts_of, store_tile


@triton.jit(do_not_specialize=["T", "round"])
def _add_kept_dhidden_kernel(
    d, weight,  # in:  [slots * TILE_T, TILE_V], [V, H]; descriptors if TMA
    lists_ptr,  # in:  of ``TileLists``
    acc_ptr,  # in and out: [T, H] fp32
    T, V, H, rows, round,
    stride_weight_v, stride_weight_h, stride_acc_t,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program adds all tiles of one block of tokens to a [BLOCK_T, BLOCK_H] tile of acc."""
    STEPS: tl.constexpr = parts_of(TILE_V, BLOCK_V)
    num_h = tl.cdiv(H, BLOCK_H)
    start_h = tl.program_id(0) % num_h * BLOCK_H
    row = tl.program_id(0) // num_h % (TILE_T // BLOCK_T) * BLOCK_T
    place = tl.program_id(0) // (num_h * (TILE_T // BLOCK_T))
    _, row_ptr, _, order_ptr, round_ptr, next_ptr = list_pointers(lists_ptr, T, V, round)
    block = tl.load(order_ptr + tl.cdiv(V, TILE_V) + place)
    begin = tl.load(round_ptr + 2 + block)
    count = tl.load(next_ptr + 2 + block) - begin
    if count > 0:
        # The GEMM begins with what is there, which is loaded beside the first operands.
        offs_t = block * TILE_T + row + tl.arange(0, BLOCK_T)
        offs_h = start_h + tl.arange(0, BLOCK_H)
        mask = (offs_t[:, None] < T) & (offs_h[None, :] < H)
        ptrs = acc_ptr + offs_t.to(tl.int64)[:, None] * stride_acc_t + offs_h[None, :]
        acc = tl.load(ptrs, mask=mask, other=0.0)
        start_v = tl.load(row_ptr + 2 * begin) * TILE_V
        start_d = tl.load(row_ptr + 2 * begin + 1) * TILE_T + row
        for step in tl.range(0, count * STEPS):
            v = step % STEPS * BLOCK_V
            x = load_tile(d, start_d, v, rows, TILE_V, TILE_V, 1, BLOCK_T, BLOCK_V, TMA)
            w = load_tile(
                weight, start_v + v, start_h, V, H, stride_weight_v, stride_weight_h,
                BLOCK_V, BLOCK_H, TMA,
            )  # fmt: skip
            entry = 2 * tl.minimum(begin + (step + 1) // STEPS, begin + count - 1)
            start_v = tl.load(row_ptr + entry) * TILE_V
            start_d = tl.load(row_ptr + entry + 1) * TILE_T + row
            acc = dot(x, w, acc)
        tl.store(ptrs, acc, mask=mask)


@triton.jit(do_not_specialize=["T", "round"])
def _kept_dweight_kernel(
    d, hidden,  # in:  [slots * TILE_T, TILE_V], [T, H]; descriptors if TMA
    lists_ptr,  # in:  of ``TileLists``
    q_ptr, hbar_ptr, row_ptr,  # in:  [V], [J, H], [H] fp32
    out,  # out: [V, H]; a descriptor if TMA_OUT
    T, V, H, rows, round,
    strides,  # of hidden by t and h, of out by v
    ACCUMULATES: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, GROUP_H: tl.constexpr,
):  # fmt: skip
    """A program computes every num_programs-th tile; GROUP_H blocks of H keep hidden in L2."""
    stride_hidden_t, stride_hidden_h, stride_out_v = strides
    STEPS: tl.constexpr = parts_of(TILE_T, BLOCK_T)
    PARTS: tl.constexpr = parts_of(TILE_V, BLOCK_V)
    tile_ptr, _, first_tile_ptr, order_ptr, round_ptr, next_ptr = list_pointers(
        lists_ptr, T, V, round
    )
    first_tile = tl.load(round_ptr)
    first_column = tl.load(round_ptr + 1)
    columns = tl.load(next_ptr + 1) - first_column
    num_h = tl.cdiv(H, BLOCK_H)
    for item in tl.range(tl.program_id(0), columns * PARTS * num_h, tl.num_programs(0)):
        first_h = item // (columns * PARTS * GROUP_H) * GROUP_H
        width = tl.minimum(num_h - first_h, GROUP_H)
        place = item % (columns * PARTS * GROUP_H)
        start_h = (first_h + place % width) * BLOCK_H
        col = place // width % PARTS * BLOCK_V
        j = tl.load(order_ptr + first_column + place // (width * PARTS))
        begin = tl.load(first_tile_ptr + j)
        end = tl.load(first_tile_ptr + j + 1)
        acc = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
        start_d = (begin - first_tile) * TILE_T
        start_t = tl.load(tile_ptr + 2 * begin, mask=begin < end, other=0) * TILE_T
        for step in tl.range(0, (end - begin) * STEPS):
            x = load_tile(
                d, start_d + step * BLOCK_T, col, rows, TILE_V, TILE_V, 1, BLOCK_T, BLOCK_V, TMA
            )
            h = load_tile(
                hidden, start_t + step % STEPS * BLOCK_T, start_h, T, H,
                stride_hidden_t, stride_hidden_h, BLOCK_T, BLOCK_H, TMA,
            )  # fmt: skip
            entry = tl.minimum(begin + (step + 1) // STEPS, end - 1)
            start_t = tl.load(tile_ptr + 2 * entry) * TILE_T
            acc = dot(x.T, h, acc)

        start_v = j * TILE_V + col
        offs_v = start_v + tl.arange(0, BLOCK_V)
        offs_h = start_h + tl.arange(0, BLOCK_H)
        q = tl.load(q_ptr + offs_v, mask=offs_v < V, other=0.0)
        hbar_row = hbar_ptr + j.to(tl.int64) * H + offs_h
        acc += q[:, None] * tl.load(hbar_row, mask=offs_h < H, other=0.0)[None, :]
        if row_ptr is not None:
            acc += tl.load(row_ptr + offs_h, mask=offs_h < H, other=0.0)[None, :]
        if ACCUMULATES:
            # Not the GEMM's first value: tensor cores truncate, and a sum over many microbatches
            # would drift towards 0.
            add_tile(out, acc, start_v, start_h, V, H, stride_out_v, ADDS=True)
        else:
            store_tile(out, acc, start_v, start_h, V, H, stride_out_v, BLOCK_V, BLOCK_H, TMA_OUT)


@triton.jit(do_not_specialize=["T", "round"])
def _add_kept_dbias_kernel(
    d_ptr, scale_ptr,  # in:  [slots * TILE_T, TILE_V], [T] fp32
    lists_ptr,  # in:  of ``TileLists``
    out_ptr,  # in and out: [V] fp32
    T, V, round,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A program sums BLOCK_V rows of one column of tiles, if the round has it."""
    tile_ptr, _, first_tile_ptr, _, round_ptr, next_ptr = list_pointers(lists_ptr, T, V, round)
    j = tl.load(round_ptr + 1) + tl.program_id(0)
    if j < tl.load(next_ptr + 1):
        first_tile = tl.load(round_ptr)
        offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
        acc = tl.zeros((TILE_T, BLOCK_V), tl.float32)
        for tile in range(tl.load(first_tile_ptr + j), tl.load(first_tile_ptr + j + 1)):
            offs = (tile - first_tile).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
            x = tl.load(d_ptr + offs[:, None] * TILE_V + offs_v[None, :]).to(tl.float32)
            if scale_ptr is not None:
                offs_t = tl.load(tile_ptr + 2 * tile) * TILE_T + tl.arange(0, TILE_T)
                x *= tl.load(scale_ptr + offs_t, mask=offs_t < T, other=0.0)[:, None]
            acc += x
        offs_v += j * TILE_V
        total = tl.load(out_ptr + offs_v, mask=offs_v < V, other=0.0) + tl.sum(acc, axis=0)
        tl.store(out_ptr + offs_v, total, mask=offs_v < V)


def _order(arch: str, itemsize: int) -> tuple[int, int]:
    """Return GROUP_H of dweight and its most programs per multiprocessor, measured on an H200."""
    if arch == tuning.INTERPRETED:
        return 2, 4
    if itemsize == 4:
        return 16, 16
    return (4, 4) if arch == "sm_90" else (8, 16)


def add_kept_dhidden(d: Tensor, weight: Tensor, lists: TileLists, round: int, acc: Tensor) -> None:
    """Add ``D @ weight`` of the round's kept tiles to ``acc`` [T, H] fp32; weight is [V, H]."""
    T, H = acc.shape
    arch, _ = tuning.device_arch(d.device)
    config = tuning.TILES[arch, d.element_size()]
    rows = config.BLOCK_T
    columns = config.BLOCK_V
    shared = config.BLOCK_H
    tma = has_tma(arch, d, weight)
    programs = -(-H // columns) * (tiles.TILE_T // rows) * lists.blocks
    _add_kept_dhidden_kernel[(programs,)](
        matrix(d, (rows, shared), tma),
        matrix(weight, (shared, columns), tma),
        lists.parts,
        acc,
        T, len(weight), H, len(d), round,
        *weight.stride(), acc.stride(0),
        TMA=tma,
        BLOCK_T=rows, BLOCK_H=columns, BLOCK_V=shared,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def kept_dweight(
    d: Tensor, hidden: Tensor, lists: TileLists, round: int, q: Tensor, hbar: Tensor,
    row: Tensor | None, *, out: Tensor, accumulates: bool,
) -> None:  # fmt: skip
    """Write to the round's rows of ``out`` [V, H] ``D.T @ hidden + q[v] * hbar[tile of v] + row``.

    hidden [T, H] is that of dweight's GEMM, 0 in ignored rows. q is [V], hbar [J, H] and row [H],
    all fp32. With ``accumulates`` the rows are added to instead. Rounded once, in out's dtype.
    """
    V, H = out.shape
    arch, programs = tuning.device_arch(d.device)
    config = tuning.TILES[arch, d.element_size()]
    group_h, most_programs = _order(arch, d.element_size())
    rows = config.BLOCK_T
    columns = config.BLOCK_V
    shared = config.BLOCK_H
    tma = has_tma(arch, d, hidden)
    # A tile of fp32 would take the shared memory of the operands' stages.
    tma_out = has_tma(arch, out) and out.dtype == hidden.dtype and not accumulates
    items = -(-H // columns) * (tiles.TILE_V // rows) * len(hbar)
    _kept_dweight_kernel[(min(programs * most_programs, items),)](
        matrix(d, (shared, rows), tma),
        matrix(hidden, (shared, columns), tma),
        lists.parts,
        q, hbar, row,
        matrix(out, (rows, columns), tma_out),
        len(hidden), V, H, len(d), round,
        (*hidden.stride(), out.stride(0)),
        ACCUMULATES=accumulates, TMA=tma, TMA_OUT=tma_out,
        BLOCK_V=rows, BLOCK_H=columns, BLOCK_T=shared, GROUP_H=group_h,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def add_kept_dbias(
    d: Tensor, scale: Tensor | None, lists: TileLists, round: int, out: Tensor
) -> None:
    """Add ``sum_t scale[t] * D[t]`` of the round's kept tiles to ``out`` [V] fp32; None is 1."""
    T = tiles.TILE_T * lists.blocks if scale is None else len(scale)
    BLOCK_V = 64
    _add_kept_dbias_kernel[(lists.J, tiles.TILE_V // BLOCK_V)](
        d, scale,
        lists.parts,
        out,
        T, len(out), round,
        BLOCK_V=BLOCK_V,
    )  # fmt: skip
