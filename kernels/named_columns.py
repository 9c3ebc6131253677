"""Columns of a tile that statistics leave out beside the label's: those of a token's named ids.

T = tokens, N = named ids of all tokens, those of one token ascending.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.kernel import Kernel
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.tuning import next_power_of_2


@triton.jit
def unnamed_columns(x, ids_ptr, begin, end, offs_v, vocab_start_index):
    """x [BLOCK_T, BLOCK_V], but -inf at ids from ``begin`` to ``end``, [BLOCK_T] each.

    Takes as many steps of a comparison and a select as the token with the most ids has.
    """
    for i in range(0, tl.max(end - begin, axis=0)):
        ids = tl.load(ids_ptr + begin + i, mask=begin + i < end, other=-1)
        column = (ids - vocab_start_index).to(tl.int32)
        x = tl.where(offs_v[None, :] == column[:, None], -float("inf"), x)
    return x


@Kernel
def _tile_starts_kernel(
    ids_ptr, begin_ptr, end_ptr,  # in:  [N] int64, [T] int64 twice
    starts_ptr,  # out: [T, num_v + 1] int64
    num_v, vocab_start_index,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """A program counts the ids of one token that lie before each of BLOCK_J tiles of columns."""
    t = tl.program_id(0).to(tl.int64)
    offs_j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    begin, end = tl.load(begin_ptr + t), tl.load(end_ptr + t)
    before = tl.zeros((BLOCK_J,), tl.int64)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ids = tl.load(ids_ptr + n, mask=n < end, other=0) - vocab_start_index
        is_before = (ids[:, None] < offs_j[None, :] * BLOCK_V) & (n < end)[:, None]
        before += tl.sum(is_before.to(tl.int32), axis=0)
    tl.store(starts_ptr + t * (num_v + 1) + offs_j, begin + before, mask=offs_j <= num_v)


def tile_starts(logits: ShardLogits, num_v: int, BLOCK_V: int) -> Tensor:
    """Return [T, num_v + 1] int64: which of the named ids is the first of each tile of columns."""
    assert logits.named is not None
    starts = torch.empty(logits.T, num_v + 1, dtype=torch.int64, device=logits.hidden.device)
    BLOCK_J = min(512, next_power_of_2(num_v + 1))
    _tile_starts_kernel[(logits.T, -(-(num_v + 1) // BLOCK_J))](
        *logits.named,
        starts,
        num_v, logits.vocab_start_index,
        BLOCK_V=BLOCK_V, BLOCK_N=16, BLOCK_J=BLOCK_J,
    )  # fmt: skip
    return starts
