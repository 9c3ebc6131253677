"""D of the kept tiles of filtered gradients, one round at a time.

T = tokens, V = vocabulary rows here, H = hidden size. D of a round lies packed in the order of
``tile_lists.py``: a [TILE_T, TILE_V] tile for each kept tile, 0 beyond T and V.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.filtered import tiles
from flce_dist.kernels.filtered.tile_lists import TILE_T, TILE_V, TileLists, list_pointers
from flce_dist.kernels.logits.launching import tile_launch
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.logits.tile import label_columns, logits_tile
from flce_dist.kernels.primitives import exp, parts_of, store_tile
from flce_dist.kernels.rows.formulas import RowGradient


@triton.jit(do_not_specialize=["T", "round"])
def _kept_dlogits_kernel(
    hidden, weight, bias_ptr, labels_ptr,  # in:  [T, H], [V, H], [V], [T] int64 (global ids)
    reference_ptr, label_value_ptr, scale_ptr,  # in:  [T] fp32 each
    lists_ptr,  # in:  of ``TileLists``
    out,  # out: [slots * TILE_T, TILE_V]; like hidden and weight a descriptor if TMA
    T, V, H, rows, round,
    strides,  # the tuples are those of ShardLogits
    vocab_start_index, scalars,
    EVEN_V: tl.constexpr, TMA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A program computes every num_programs-th part [BLOCK_T, BLOCK_V] of the round's tiles."""
    ignore_index = scalars.ignore_index
    PARTS_V: tl.constexpr = parts_of(TILE_V, BLOCK_V)
    PARTS: tl.constexpr = parts_of(TILE_T, BLOCK_T) * PARTS_V
    tile_ptr, _, _, _, round_ptr, next_ptr = list_pointers(lists_ptr, T, V, round)
    first = tl.load(round_ptr)
    parts = (tl.load(next_ptr) - first) * PARTS
    for part in tl.range(tl.program_id(0), parts, tl.num_programs(0), flatten=True):
        slot = part // PARTS
        row = part % PARTS // PARTS_V * BLOCK_T
        col = part % PARTS_V * BLOCK_V
        start_t = tl.load(tile_ptr + 2 * (first + slot)) * TILE_T + row
        start_v = tl.load(tile_ptr + 2 * (first + slot) + 1) * TILE_V + col
        offs_t = start_t + tl.arange(0, BLOCK_T)
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask_t = offs_t < T
        column, counted = label_columns(labels_ptr, offs_t, T, V, vocab_start_index, ignore_index)
        reference = tl.load(reference_ptr + offs_t, mask=mask_t, other=0.0)
        label_value = tl.load(label_value_ptr + offs_t, mask=mask_t, other=0.0)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + offs_t, mask=mask_t, other=0.0)
        z = logits_tile(
            hidden, weight, bias_ptr, start_t, start_v, T, V, H,
            strides, scalars, BLOCK_T, BLOCK_V, BLOCK_H, TMA,
        )  # fmt: skip

        x = tl.where(counted[:, None], z - reference[:, None], -float("inf"))
        if not EVEN_V:  # exp(-reference) may be inf there, and inf * 0 is NaN
            x += tl.where(offs_v < V, 0.0, -float("inf"))[None, :]
        d = tl.where(offs_v[None, :] == column[:, None], label_value[:, None], exp(x))
        if scale_ptr is not None:
            d *= scale[:, None]
        store_tile(out, d, slot * TILE_T + row, col, rows, TILE_V, TILE_V, BLOCK_T, BLOCK_V, TMA)


def new_kept_buffer(logits: ShardLogits, capacity: int) -> Tensor:
    """Return uninitialised [capacity * TILE_T, TILE_V] for D of one round."""
    return logits.hidden.new_empty(capacity * tiles.TILE_T, tiles.TILE_V)


def kept_dlogits(
    logits: ShardLogits, rows: RowGradient, scale: Tensor | None, lists: TileLists, round: int, *,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """Write D, relative to the reference of ``rows``, times scale [T] fp32, to out; return it."""
    launch = tile_launch(logits, out)
    config = launch.config
    parts = out.numel() // (config.BLOCK_T * config.BLOCK_V)
    _kept_dlogits_kernel[(min(launch.programs, parts),)](
        *launch.operands(logits), logits.labels,
        rows.reference, rows.label_value, scale,
        lists.parts,
        launch.output(out),
        logits.T, logits.V, logits.H, len(out), round,
        logits.strides,
        logits.vocab_start_index, logits.scalars,
        EVEN_V=logits.V % tiles.TILE_V == 0, TMA=launch.tma,
        BLOCK_T=config.BLOCK_T, BLOCK_V=config.BLOCK_V, BLOCK_H=config.BLOCK_H,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
