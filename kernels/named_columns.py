"""Columns of a tile that statistics leave out beside the label's: those of a token's named ids.

T = tokens, N = named ids of all tokens, those of one token ascending.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.primitives import INTERPRET
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.tuning import next_power_of_2

# A thread has a multiple of so many elements of any tile, or would store to undefined addresses.
_PACK = tl.constexpr(16)


def _take_out_in_ptx(pack: int) -> tuple[str, str]:
    """Return text and constraints of ``take_out`` for ``pack`` elements of a thread.

    Operands, each of all elements: out, x, offs_v, column, near, the address in out_ptr.
    """
    out, x, offs, column, near, address = (
        [f"${pack * operand + i}" for i in range(pack)] for operand in range(6)
    )
    lines = [f"or.b32 any, {near[0]}, {near[1]};"]
    lines += [f"or.b32 any, any, {bit};" for bit in near[2:]]
    lines += [f"mov.b32 {out[i]}, {x[i]};" for i in range(pack)]
    lines += ["setp.eq.b32 none, any, 0;", "@none bra DONE;"]
    for i in range(pack):
        lines += [
            f"setp.eq.s32 named, {offs[i]}, {column[i]};",
            f"@named st.global.b32 [{address[i]}], {x[i]};",
            f"@named mov.b32 {out[i]}, 0xff800000;",  # -inf
        ]
    text = "\n".join(["{", ".reg .pred none, named;", ".reg .b32 any;", *lines, "DONE:", "}"])
    kinds = ("=&f", "f", "r", "r", "r", "l")
    return text, ",".join(kind for kind in kinds for _ in range(pack))


_PTX, _CONSTRAINTS = map(tl.constexpr, _take_out_in_ptx(_PACK.value))


@triton.jit
def named_column(ids_ptr, n, end, first_id):
    """The columns of entries n, [BLOCK_T], counted from ``first_id``; -1 from ``end`` on."""
    id = tl.load(ids_ptr + n, mask=n < end, other=0)
    return tl.where(n < end, id - first_id, -1).to(tl.int32)


@triton.jit
def take_out(x, column, out_ptr):
    """x [BLOCK_T, BLOCK_V], but -inf in these columns [BLOCK_T]; what was there goes to out_ptr.

    A select in each element and a sum over them cost 4 % of the GEMM at H = 4096, and registers
    that spill. Here a thread passes over 16 elements at once unless one of them is near the column,
    which costs a tenth.
    """
    offs_v = tl.arange(0, x.shape[1])
    if INTERPRET:
        is_named = offs_v[None, :] == column[:, None]
        tl.store(out_ptr, tl.sum(tl.where(is_named, x, 0.0), axis=1), mask=column >= 0)
        return tl.where(is_named, -float("inf"), x)
    # The elements of a pack are neighbours in few rows, so that most of these are one register.
    near = ((offs_v >> 5)[None, :] == (column >> 5)[:, None]).to(tl.int32)
    offs, columns = tl.broadcast(offs_v[None, :], column[:, None])
    _, address = tl.broadcast(offs_v[None, :], out_ptr.to(tl.int64)[:, None])
    return tl.inline_asm_elementwise(
        _PTX, _CONSTRAINTS, [x, offs, columns, near, address], x.dtype, is_pure=False, pack=_PACK
    )


@Kernel
def _tile_starts_kernel(
    ids_ptr, begin_ptr, end_ptr,  # in:  [N] int64, [T] int64 twice
    starts_ptr,  # out: [T, num_v + 1] int32
    V, num_v, vocab_start_index,
    BLOCK_V: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """A program finds the first id of one token that lies in each of BLOCK_J tiles of columns."""
    t = tl.program_id(0).to(tl.int64)
    offs_j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    n, end = tl.load(begin_ptr + t), tl.load(end_ptr + t)
    start_id = vocab_start_index + tl.minimum(offs_j * BLOCK_V, V)
    found = n + tl.zeros((BLOCK_J,), tl.int64)
    left = end - n
    while left > 0:  # the first entry that is not below start_id is among so many from found on
        half = (left + 1) // 2
        id = tl.load(ids_ptr + found + half - 1, mask=found + half <= end, other=1 << 31)
        found += tl.where(id < start_id, half, 0)
        left -= half
    ptrs = starts_ptr + t * (num_v + 1) + offs_j
    tl.store(ptrs, found.to(tl.int32), mask=offs_j <= num_v)


def tile_starts(logits: ShardLogits, num_v: int, BLOCK_V: int) -> Tensor:
    """Return [T, num_v + 1] int32: which of the named ids is the first of each tile of columns."""
    assert logits.named is not None
    starts = torch.empty(logits.T, num_v + 1, dtype=torch.int32, device=logits.hidden.device)
    BLOCK_J = min(512, next_power_of_2(num_v + 1))
    _tile_starts_kernel[(logits.T, -(-(num_v + 1) // BLOCK_J))](
        *logits.named,
        starts,
        logits.V, num_v, logits.vocab_start_index,
        BLOCK_V=BLOCK_V, BLOCK_J=BLOCK_J,
    )  # fmt: skip
    return starts
