"""Lists of the kept tiles, in the orders in which the GEMMs of filtered gradients read them.

A tile is (b, j): block b of tokens, column j of the vocabulary (``tiles.py``); J = columns.
Tiles are numbered column by column, in each by block: the number of a tile minus that of the first
of its round is its slot in the buffer of D. Rounds are ranges of columns. They are cut from the
end, at every ``capacity - blocks`` kept tiles, so the last rounds are full and the first are empty
where few tiles are kept. All sizes are fixed and nothing is read on the host.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.tuning import next_power_of_2


@dataclass(frozen=True)
class TileLists:
    """The kept tiles as int32 tensors; N = blocks * J, the most there can be."""

    rounds: int
    blocks: int
    block: Tensor  # [N] of each number of a tile
    column: Tensor  # [N] the same
    first_tile: Tensor  # [J + 1] number of the first tile of each column, then of all tiles
    round_tile: Tensor  # [rounds + 1] the same of each round
    round_column: Tensor  # [rounds + 1] first column of each round
    column_order: Tensor  # [J] columns of each round, those with most tiles first
    row_column: Tensor  # [blocks, J] columns of each block, ascending
    row_slot: Tensor  # [blocks, J] and the slots of these tiles
    row_bounds: Tensor  # [rounds + 1, blocks] where each round begins in the flattened rows
    block_order: Tensor  # [rounds, blocks] those with most tiles in the round first


@Kernel
def _column_lists_kernel(
    kept_ptr, counts_ptr,  # in:  [blocks, J] uint8, [J] int32
    block_ptr, column_ptr, first_tile_ptr,  # out: [N], [N], [J + 1] int32
    round_tile_ptr, round_column_ptr, column_order_ptr,  # out: [rounds + 1] each, [J] int32
    slot_ptr,  # out: [blocks, J] int32, only of kept tiles
    blocks, J, rounds, step,
    BLOCK_B: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """A program lists the tiles of one column; the first also lists the rounds."""
    j = tl.program_id(0)
    offs_j = tl.arange(0, BLOCK_J)
    mask_j = offs_j < J
    counts = tl.load(counts_ptr + offs_j, mask=mask_j, other=0)
    last_tile = tl.cumsum(counts, axis=0)
    of_round = rounds - 1 - (tl.sum(counts, axis=0) - last_tile) // step

    is_mine = offs_j == j
    count = tl.sum(tl.where(is_mine, counts, 0), axis=0)
    round = tl.sum(tl.where(is_mine, of_round, 0), axis=0)
    first_tile = tl.sum(tl.where(offs_j < j, counts, 0), axis=0)
    earlier = of_round < round
    round_tile = tl.sum(tl.where(earlier, counts, 0), axis=0)
    comes_first = (counts > count) | ((counts == count) & (offs_j < j))
    comes_first = earlier | ((of_round == round) & comes_first)
    tl.store(column_order_ptr + tl.sum((comes_first & mask_j).to(tl.int32), axis=0), j)
    tl.store(first_tile_ptr + j, first_tile)
    if j == J - 1:
        tl.store(first_tile_ptr + J, first_tile + count)

    offs_b = tl.arange(0, BLOCK_B)
    offs = offs_b * J + j
    kept = tl.load(kept_ptr + offs, mask=offs_b < blocks, other=0).to(tl.int32)
    tile = first_tile + tl.cumsum(kept, axis=0) - 1
    tl.store(block_ptr + tile, offs_b, mask=kept > 0)
    tl.store(column_ptr + tile, tl.zeros_like(offs_b) + j, mask=kept > 0)
    tl.store(slot_ptr + offs, tile - round_tile, mask=kept > 0)

    if j == 0:
        for r in range(0, rounds + 1):
            before = mask_j & (of_round < r)
            tl.store(round_column_ptr + r, tl.sum(before.to(tl.int32), axis=0))
            tl.store(round_tile_ptr + r, tl.sum(tl.where(before, counts, 0), axis=0))


@Kernel
def _row_lists_kernel(
    kept_ptr, slot_ptr, round_column_ptr,  # in:  [blocks, J] uint8, the same int32, [rounds + 1]
    row_column_ptr, row_slot_ptr, row_bounds_ptr,  # out: [blocks, J] twice, [rounds + 1, blocks]
    blocks, J, rounds,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """A program lists the tiles of one block of tokens."""
    b = tl.program_id(0)
    offs_j = tl.arange(0, BLOCK_J)
    kept = tl.load(kept_ptr + b * J + offs_j, mask=offs_j < J, other=0).to(tl.int32)
    slot = tl.load(slot_ptr + b * J + offs_j, mask=kept > 0, other=0)
    place = b * J + tl.cumsum(kept, axis=0) - 1
    tl.store(row_column_ptr + place, offs_j, mask=kept > 0)
    tl.store(row_slot_ptr + place, slot, mask=kept > 0)
    for r in range(0, rounds + 1):
        column = tl.load(round_column_ptr + r)
        before = tl.sum(tl.where(offs_j < column, kept, 0), axis=0)
        tl.store(row_bounds_ptr + r * blocks + b, b * J + before)


@Kernel
def _block_order_kernel(
    row_bounds_ptr,  # in:  [rounds + 1, blocks] int32
    block_order_ptr,  # out: [rounds, blocks] int32
    blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program finds the places of BLOCK blocks of one round."""
    row_bounds_ptr += tl.program_id(0) * blocks
    mine = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(row_bounds_ptr + mine, mask=mine < blocks, other=0)
    count = tl.load(row_bounds_ptr + blocks + mine, mask=mine < blocks, other=0) - begin
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, blocks, BLOCK):
        other = start + tl.arange(0, BLOCK)
        begin = tl.load(row_bounds_ptr + other, mask=other < blocks, other=0)
        end = tl.load(row_bounds_ptr + blocks + other, mask=other < blocks, other=-1)
        longer = (end - begin)[None, :] > count[:, None]
        equal = (end - begin)[None, :] == count[:, None]
        comes_first = longer | (equal & (other[None, :] < mine[:, None]))
        comes_first &= (other < blocks)[None, :]
        place += tl.sum(comes_first.to(tl.int32), axis=1)
    block_order_ptr += tl.program_id(0) * blocks
    tl.store(block_order_ptr + place, mine, mask=mine < blocks)


def tile_lists(kept: Tensor, capacity: int) -> TileLists:
    """List the tiles of ``kept`` [blocks, J] bool in rounds of at most ``capacity`` of them.

    capacity is at least ``2 * blocks``, or all tiles.
    """
    blocks, J = kept.shape
    N = blocks * J
    step = capacity - blocks if capacity < N else N + 1
    rounds = -(-N // step)
    lists = TileLists(
        rounds,
        blocks,
        *(
            torch.empty(shape, dtype=torch.int32, device=kept.device)
            for shape in (
                (N,), (N,), (J + 1,), (rounds + 1,), (rounds + 1,), (J,),
                (blocks, J), (blocks, J), (rounds + 1, blocks), (rounds, blocks),
            )
        ),
    )  # fmt: skip
    slot = torch.empty_like(lists.row_slot)
    kept = kept.view(torch.uint8)
    BLOCK_J = next_power_of_2(J)
    _column_lists_kernel[(J,)](
        kept, kept.sum(0, dtype=torch.int32),
        lists.block, lists.column, lists.first_tile,
        lists.round_tile, lists.round_column, lists.column_order,
        slot,
        blocks, J, rounds, step,
        BLOCK_B=next_power_of_2(blocks), BLOCK_J=BLOCK_J,
    )  # fmt: skip
    _row_lists_kernel[(blocks,)](
        kept, slot, lists.round_column,
        lists.row_column, lists.row_slot, lists.row_bounds,
        blocks, J, rounds,
        BLOCK_J=BLOCK_J,
    )  # fmt: skip
    BLOCK = min(64, next_power_of_2(blocks))
    _block_order_kernel[(rounds, -(-blocks // BLOCK))](
        lists.row_bounds,
        lists.block_order,
        blocks,
        BLOCK=BLOCK,
    )  # fmt: skip
    return lists
