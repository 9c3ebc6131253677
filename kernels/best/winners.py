"""The k best of each token's logits, of which few are read: those of blocks that may hold one.

T = tokens, V = vocabulary rows here, N = blocks of columns, k = ids of a token.

The k-th largest of the blocks' maxima is a lower bound of the k-th largest logit, since k blocks
have a logit that reaches it. Logits that reach the bound are collected from the blocks that do:
typically little more than k. Should they be too many for the buffer, the k best of it are kept, and
the bound rises to the least of these.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.best.keys import LOWEST_KEY, key_of, kth_largest, ordered
from flce_dist.kernels.tuning import next_power_of_2

AT_ONCE = 512  # logits that a program reads in one step
_BOUND_BITS = tl.constexpr(20)  # of the bound: 11 of the mantissa; a step for each
_SORTED = 128  # least number of keys that are sorted in the end
_PART = tl.constexpr(256)  # of the buffer, in one step


@triton.jit
def _load_part(buffer_ptr, start, count):
    i = start + tl.arange(0, _PART)
    return tl.load(buffer_ptr + i, mask=i < count, other=LOWEST_KEY)


@triton.jit
def _keep_best(buffer_ptr, count, k):
    """Move the k best of ``count`` keys, which are more, to the front; return the least of them.

    Few tokens need this, and its registers count for all: so it reads the buffer again for each
    bit, part by part.
    """
    tl.debug_barrier()  # all keys have been stored
    one = tl.full((), 1, tl.int64)
    least = one << 63
    for i in range(64):
        more = least ^ (one << (63 - i))  # the first step leaves the negative numbers
        reached = 0
        for start in range(0, count, _PART):
            reached += tl.sum((_load_part(buffer_ptr, start, count) >= more).to(tl.int32), axis=0)
        least = tl.where(reached >= k, more, least)
    kept = 0
    for start in range(0, count, _PART):
        keys = _load_part(buffer_ptr, start, count)
        tl.debug_barrier()  # all keys of the part have been loaded
        is_best = keys >= least
        place = kept + tl.cumsum(is_best.to(tl.int32), axis=0) - 1
        tl.store(buffer_ptr + place, keys, mask=is_best)
        kept += tl.sum(is_best.to(tl.int32), axis=0)
    return least


@triton.jit
def _winning_blocks(largest_ptr, stride_n, blocks_ptr, N, k, BLOCKS: tl.constexpr):
    """List the blocks whose maximum reaches the k-th largest; return the bound and their number.

    The list overwrites the maxima.
    """
    n = tl.arange(0, BLOCKS)
    largest = tl.load(largest_ptr + n.to(tl.int64) * stride_n, mask=n < N, other=-float("inf"))
    rank = ordered(largest)
    bound = kth_largest(rank, k, _BOUND_BITS)
    wins = (rank >= bound) & (largest > -float("inf"))
    place = tl.cumsum(wins.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # all maxima have been loaded
    tl.store(blocks_ptr + place.to(tl.int64) * stride_n, n, mask=wins)
    return bound.to(tl.int64) << 32, tl.sum(wins.to(tl.int32), axis=0)


@triton.jit
def _winners_kernel(
    z_ptr, largest_ptr,  # in:  [T, V] fp32, [T, N] fp32: of each block of COLUMNS columns
    blocks_ptr, buffer_ptr,  # scratch: [T, N] int32, in the place of largest; [T, capacity] int64
    keys_ptr,  # out: [T, k] int64, the best first
    V, N, k, capacity, stride_z_t, stride_t, stride_n, first_id,  # strides: z's, largest's
    COLUMNS: tl.constexpr, STEP: tl.constexpr, BLOCKS: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """A program takes one token, STEP logits at a time; k + STEP keys are the capacity."""
    t = tl.program_id(0).to(tl.int64)
    z_ptr += t * stride_z_t
    largest_ptr += t * stride_t
    blocks_ptr += t * stride_t
    buffer_ptr += t * capacity
    bound, num_blocks = _winning_blocks(largest_ptr, stride_n, blocks_ptr, N, k, BLOCKS)
    tl.debug_barrier()  # the list is complete
    count = tl.zeros((), tl.int32)
    for start in range(0, num_blocks, STEP // COLUMNS):
        i = start + tl.arange(0, STEP) // COLUMNS
        block_ptrs = blocks_ptr + i.to(tl.int64) * stride_n
        block = tl.load(block_ptrs, mask=i < num_blocks, other=0)
        column = block * COLUMNS + tl.arange(0, STEP) % COLUMNS
        mask = (i < num_blocks) & (column < V)
        z = tl.load(z_ptr + column, mask=mask, other=-float("inf"))
        key = key_of(z, first_id + column)
        passes = (z > -float("inf")) & (key >= bound)
        more = tl.sum(passes.to(tl.int32), axis=0)
        if count + more > capacity:
            bound = _keep_best(buffer_ptr, count, k)
            count = k
            passes &= key >= bound
            more = tl.sum(passes.to(tl.int32), axis=0)
        place = count + tl.cumsum(passes.to(tl.int32), axis=0) - 1
        tl.store(buffer_ptr + place, key, mask=passes)
        count += more
    if count > SORTED:
        bound = _keep_best(buffer_ptr, count, k)
        count = k
    tl.debug_barrier()
    i = tl.arange(0, SORTED)
    keys = tl.load(buffer_ptr + i, mask=i < count, other=LOWEST_KEY)
    keys = tl.sort(keys, descending=True)
    tl.store(keys_ptr + t * k + i, keys, mask=i < k)


def winners(
    z: Tensor, largest: Tensor, k: int, first_id: int, *, columns: int, out: Tensor
) -> None:  # fmt: skip
    """Write the keys of the k best logits of each token to ``out`` [T, k] int64, the best first.

    z is [T, V] fp32 with a unit last stride, ``largest`` [T, N] fp32 the maximum of each block
    of ``columns``, and is overwritten. Where there are fewer than k logits above -inf, LOWEST_KEY
    follows.
    """
    T, V = z.shape
    N = largest.shape[1]
    step = max(AT_ONCE, columns)
    capacity = k + step
    in_order = max(_SORTED, next_power_of_2(2 * k))
    _winners_kernel[(T,)](
        z, largest,
        largest.view(torch.int32), out.new_empty(T, capacity),
        out,
        V, N, k, capacity, z.stride(0), *largest.stride(), first_id,
        COLUMNS=columns, STEP=step, BLOCKS=max(2, next_power_of_2(N)),
        SORTED=in_order, num_warps=4 if in_order <= 2048 else 8,
    )  # fmt: skip
