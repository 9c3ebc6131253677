"""Lists of the kept tiles, in the orders in which the GEMMs of filtered gradients read them.

A tile is (b, j): block b of tokens, column j of the vocabulary; J = columns. Tiles are numbered
column by column, in each by block: its number minus that of the first of its round is a tile's slot
in the buffer of D. Rounds are ranges of columns. They are cut from the end, at every
``capacity - blocks`` kept tiles, so the first are empty where few tiles are kept.

N = blocks * J, the most tiles there can be. The lists are one int32 tensor of these parts::

    tiles [N, 2]              block and column of each number of a tile
    rows [N, 2]               columns of each block, ascending, and the slots of these tiles; those
                              of block b begin at b * J
    first_tile [J + 1]        number of the first tile of each column, then of all tiles
    column_order [J]          columns of each round, those with most tiles first
    block_order [blocks]      those with most tiles first
    of each round, and once more behind the last:
        first tile, first column
        row_bounds [blocks]   where the round begins in rows
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.filtered import tiles
from flce_dist.kernels.tuning import next_power_of_2

TILE_T = tl.constexpr(tiles.TILE_T)
TILE_V = tl.constexpr(tiles.TILE_V)


class TileLists(NamedTuple):
    """The lists of [blocks, J] tiles in ``rounds`` rounds, in one tensor: each costs the host."""

    parts: Tensor
    blocks: int
    J: int
    rounds: int


@triton.jit
def list_pointers(lists_ptr, T, V, round):
    """Return where the parts begin: four, then that of the round, and that of the next one."""
    blocks = tl.cdiv(T, TILE_T)
    J = tl.cdiv(V, TILE_V)
    row_ptr = lists_ptr + 2 * blocks * J
    first_tile_ptr = row_ptr + 2 * blocks * J
    order_ptr = first_tile_ptr + J + 1
    round_ptr = order_ptr + J + blocks + round * (2 + blocks)
    return lists_ptr, row_ptr, first_tile_ptr, order_ptr, round_ptr, round_ptr + 2 + blocks


@triton.jit(do_not_specialize=["blocks", "rounds", "step"])
def _tile_lists_kernel(
    kept_ptr,  # in:  [blocks, J] bool
    lists_ptr,  # out: all parts
    blocks, J, rounds, step,
    BLOCK_B: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Program i lists the tiles of block i, and places it and column i; 0 lists the rounds."""
    i = tl.program_id(0)
    tile_ptr, row_ptr, first_tile_ptr, order_ptr, round_ptr, _ = list_pointers(
        lists_ptr, blocks * TILE_T, J * TILE_V, 0
    )
    offs_j = tl.arange(0, BLOCK_J)
    mask_j = offs_j < J
    own = tl.load(kept_ptr + i * J + offs_j, mask=mask_j & (i < blocks), other=0).to(tl.int32)
    length = tl.sum(own, axis=0)
    longer = tl.zeros((BLOCK_B,), tl.int32)
    counts = tl.zeros((BLOCK_B, BLOCK_J), tl.int32)
    above = tl.zeros((BLOCK_B, BLOCK_J), tl.int32)
    for start in range(0, blocks, BLOCK_B):
        offs_b = start + tl.arange(0, BLOCK_B)
        mask = (offs_b < blocks)[:, None] & mask_j[None, :]
        offs = offs_b[:, None] * J + offs_j[None, :]
        kept = tl.load(kept_ptr + offs, mask=mask, other=0).to(tl.int32)
        counts += kept
        above += tl.where((offs_b < i)[:, None], kept, 0)
        of_block = tl.sum(kept, axis=1)
        longer += ((of_block > length) | ((of_block == length) & (offs_b < i))).to(tl.int32)
    counts = tl.sum(counts, axis=0)
    above = tl.sum(above, axis=0)
    last_tile = tl.cumsum(counts, axis=0)
    of_round = rounds - 1 - (tl.sum(counts, axis=0) - last_tile) // step

    if i < blocks:
        tl.store(order_ptr + J + tl.sum(longer, axis=0), i)
        tile = last_tile - counts + above
        slot = tile
        for r in range(0, rounds + 1):
            before = of_round < r
            first = tl.sum(tl.where(before, counts, 0), axis=0)
            slot = tl.where(of_round == r, tile - first, slot)
            bound = i * J + tl.sum(tl.where(before, own, 0), axis=0)
            tl.store(round_ptr + 2 + i, bound)
            if i == 0:
                tl.store(round_ptr, first)
                tl.store(round_ptr + 1, tl.sum((before & mask_j).to(tl.int32), axis=0))
            round_ptr += 2 + blocks
        place = i * J + tl.cumsum(own, axis=0) - 1
        tl.store(tile_ptr + 2 * tile, i, mask=own > 0)
        tl.store(tile_ptr + 2 * tile + 1, offs_j, mask=own > 0)
        tl.store(row_ptr + 2 * place, offs_j, mask=own > 0)
        tl.store(row_ptr + 2 * place + 1, slot, mask=own > 0)
    if i < J:
        mine = offs_j == i
        count = tl.sum(tl.where(mine, counts, 0), axis=0)
        round = tl.sum(tl.where(mine, of_round, 0), axis=0)
        comes_first = (counts > count) | ((counts == count) & (offs_j < i))
        comes_first = (of_round < round) | ((of_round == round) & comes_first)
        tl.store(order_ptr + tl.sum((comes_first & mask_j).to(tl.int32), axis=0), i)
        last = tl.sum(tl.where(mine, last_tile, 0), axis=0)
        tl.store(first_tile_ptr + i, last - count)
        if i == J - 1:
            tl.store(first_tile_ptr + J, last)


def tile_lists(kept: Tensor, capacity: int) -> TileLists:
    """List the tiles of ``kept`` [blocks, J] bool in rounds of at most ``capacity`` tiles.

    That is at least ``2 * blocks``, two columns of tiles.
    """
    blocks, J = kept.shape
    N = blocks * J
    step = capacity - blocks if capacity < N else N + 1
    rounds = -(-N // step)
    size = 4 * N + 2 * J + 1 + blocks + (rounds + 1) * (2 + blocks)
    parts = torch.empty(size, dtype=torch.int32, device=kept.device)
    BLOCK_J = next_power_of_2(J)
    _tile_lists_kernel[(max(blocks, J),)](
        kept,
        parts,
        blocks, J, rounds, step,
        BLOCK_B=max(1, min(64, 8192 // BLOCK_J)), BLOCK_J=BLOCK_J, num_warps=8,
    )  # fmt: skip
    return TileLists(parts, blocks, J, rounds)
