"""Columns of a tile that statistics leave out beside the label's: those of a token's named ids.

T = tokens, N = named ids of all tokens, those of one token ascending.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.logits.target import NamedIds
from flce_dist.kernels.primitives import INTERPRET

# Elements of one inline assembly. It divides the elements that a thread has of any tile: Triton
# would fill up a last pack with undefined operands, among them addresses that it stores to.
_PACK = tl.constexpr(16)


def _take_out_in_ptx(pack: int) -> tuple[str, str]:
    """Return text and constraints of ``take_out`` for ``pack`` elements of a thread.

    Operands, each of all elements: x in the registers of the result and as given, offs_v, the two
    columns, near, the address in out_ptr.
    """
    x, _, offs, first, second, near, address = (
        [f"${pack * operand + i}" for i in range(pack)] for operand in range(7)
    )
    lines = [f"or.b32 any, {near[0]}, {near[1]};"]
    lines += [f"or.b32 any, any, {bit};" for bit in near[2:]]
    lines += ["setp.eq.b32 none, any, 0;", "@none bra DONE;"]
    for i in range(pack):
        for column, place in ((first[i], address[i]), (second[i], f"{address[i]}+4")):
            lines += [
                f"setp.eq.s32 named, {offs[i]}, {column};",
                f"@named st.global.b32 [{place}], {x[i]};",
                f"@named mov.b32 {x[i]}, 0xff800000;",  # -inf
            ]
    text = "\n".join(["{", ".reg .pred none, named;", ".reg .b32 any;", *lines, "DONE:", "}"])
    outputs = ["=f"] * pack
    in_place = [str(i) for i in range(pack)]  # x stays where it is
    inputs = [register for register in ("r", "r", "r", "r", "l") for _ in range(pack)]
    return text, ",".join(outputs + in_place + inputs)


_PTX, _CONSTRAINTS = map(tl.constexpr, _take_out_in_ptx(_PACK.value))


@triton.jit
def named_column(ids_ptr, n, end, first_id, V):
    """Columns of entries n, [BLOCK_T], counted from ``first_id``; negative where there is none."""
    column = tl.load(ids_ptr + n, mask=n < end, other=-1) - first_id
    return tl.where(column < V, column, -1).to(tl.int32)


@triton.jit
def take_out(x, first, second, out_ptr):
    """x [BLOCK_T, BLOCK_V], but -inf in two columns of each row, whose x go to out_ptr [BLOCK_T].

    That of the second goes to the place behind. A select in each element and a sum over them cost 4
    % of the GEMM at H = 4096, and registers that spill. Here a thread passes over 16 elements at
    once unless one of them is near a column.
    """
    offs_v = tl.arange(0, x.shape[1])
    if INTERPRET:
        for i in tl.static_range(2):
            column = first if i == 0 else second
            is_named = offs_v[None, :] == column[:, None]
            mask = (column >= 0) & (column < x.shape[1])
            tl.store(out_ptr + i, tl.sum(tl.where(is_named, x, 0.0), axis=1), mask=mask)
            x = tl.where(is_named, -float("inf"), x)
        return x
    # The elements of a pack are neighbours in few rows, so that most of these are one register.
    pack_v = (offs_v >> 5)[None, :]
    near = (pack_v == (first >> 5)[:, None]) | (pack_v == (second >> 5)[:, None])
    offs, first = tl.broadcast(offs_v[None, :], first[:, None])
    _, second = tl.broadcast(offs_v[None, :], second[:, None])
    _, address = tl.broadcast(offs_v[None, :], out_ptr.to(tl.int64)[:, None])
    operands = [x, offs, first, second, near.to(tl.int32), address]
    return tl.inline_asm_elementwise(
        _PTX, _CONSTRAINTS, operands, x.dtype, is_pure=False, pack=_PACK
    )


@triton.jit
def first_entry(ids_ptr, n, left, end, id):
    """The first entry from n on whose id is not below ``id``, or ``end``; [BLOCK_N] as n and id.

    Ids ascend, and there are at most ``left`` entries from n to ``end``.
    """
    while left > 0:
        half = (left + 1) // 2
        last = tl.load(ids_ptr + n + half - 1, mask=n + half <= end, other=1 << 31)
        n += tl.where(last < id, half, 0)
        left -= half
    return n


@triton.jit(do_not_specialize=["T"])
def _named_tiles_kernel(
    ids_ptr, begin_ptr, end_ptr,  # in:  [N] int64, [T] int64 twice
    tiles_ptr, most_ptr,  # out: [num_v, T] int64, [num_v, num_t] int32, what ``named_tiles`` says
    T, V, vocab_start_index,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program takes one token; the first entry of each tile finds the first of the next."""
    t = tl.program_id(0).to(tl.int64)
    begin = tl.load(begin_ptr + t)
    end = tl.load(end_ptr + t)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        column = tl.load(ids_ptr + n, mask=n < end, other=-1) - vocab_start_index
        last = tl.load(ids_ptr + n - 1, mask=(n > begin) & (n < end), other=-1) - vocab_start_index
        tile = column // BLOCK_V
        is_first = (column >= 0) & (column < V) & ((last < 0) | (last // BLOCK_V < tile))
        next_id = vocab_start_index + tl.minimum((tile + 1) * BLOCK_V, V)
        next_n = first_entry(ids_ptr, n, end - start, end, next_id)
        second = tl.load(ids_ptr + n + 1, mask=is_first & (next_n > n + 1), other=-1)
        second = tl.where(second < 0, 0xFFFF, second - vocab_start_index - tile * BLOCK_V)
        in_tile = (second << 48) | ((column - tile * BLOCK_V) << 32) | n
        tl.store(tiles_ptr + tile * T + t, in_tile, mask=is_first)
        most_ptrs = most_ptr + tile * tl.cdiv(T, BLOCK_T) + t // BLOCK_T
        tl.atomic_max(most_ptrs, (next_n - n).to(tl.int32), mask=is_first, sem="relaxed")


def named_tiles(
    logits: ShardLogits, named: NamedIds, num_v: int, BLOCK_T: int, BLOCK_V: int
) -> tuple[Tensor, Tensor]:
    """Return [num_v, T] int64, a token's first entries in a tile, and [num_v, num_t] int32.

    The former is -1 without any, else from the high bits to the low ones: the second entry's column
    (16 bits, all set if there is none), the first one's (16 bits), the first one's number. The
    latter is the most entries that one of BLOCK_T tokens has in a tile.
    """
    tiles = logits.labels.new_full((num_v, logits.T), -1)
    most = logits.labels.new_zeros(num_v, -(-logits.T // BLOCK_T), dtype=torch.int32)
    _named_tiles_kernel[(logits.T,)](
        named.ids, named.begin, named.end,
        tiles, most,
        logits.T, logits.V, logits.vocab_start_index,
        BLOCK_T=BLOCK_T, BLOCK_V=BLOCK_V, BLOCK_N=64, num_warps=2,
    )  # fmt: skip
    return tiles, most
