"""Gumbel noise from a counter: the same for a token's draw and an id wherever they are computed.

Philox4x32 with 7 rounds, the fewest that pass BigCrush (Salmon et al. 2011), gives four numbers.
They belong to ids that differ in bits 0 and 3, which one thread has in tiles of tensor cores: the
compiler then computes them once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_dist.kernels.primitives import INTERPRET, LN2

ROUNDS = 7
_ROUNDS = tl.constexpr(ROUNDS)
_LARGEST_U = tl.constexpr(1 - 2.0**-24)


@triton.jit
def _log2(x):
    """By the hardware's instruction; tl.log2 is a polynomial of 15 operations."""
    if INTERPRET:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], x.dtype, is_pure=True, pack=1
    )


@triton.jit
def gumbel(noise, offs_t, mask_t, first_id, offs_v, ALIGNED: tl.constexpr):
    """[BLOCK_T, BLOCK_V] fp32 for ids from first_id on, a multiple of 16 if ALIGNED."""
    seed_ptr, counters_ptr = noise
    seed = tl.load(seed_ptr)
    counter = tl.load(counters_ptr + offs_t, mask=mask_t, other=0)
    if ALIGNED:
        segment = (first_id >> 4) + (offs_v >> 4)
        place = offs_v & 15
    else:
        segment = (first_id + offs_v) >> 4
        place = (first_id + offs_v) & 15
    column = (segment << 2) | ((place >> 1) & 3)
    low = counter & 0xFFFFFFFF
    high = counter >> 32
    column, low = tl.broadcast(column[None, :].to(tl.uint32), low[:, None].to(tl.uint32))
    high = tl.broadcast_to(high[:, None].to(tl.uint32), column.shape)
    r0, r1, r2, r3 = tl.philox(seed, column, low * 0, low, high, _ROUNDS)
    is_odd = ((place & 1) != 0)[None, :]
    is_far = ((place & 8) != 0)[None, :]
    r = tl.where(is_far, tl.where(is_odd, r3, r2), tl.where(is_odd, r1, r0))
    u = tl.minimum((r.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST_U)
    # -log(1 - u) with the relative accuracy of u, which decides which id wins.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u / 4)))
    exponential = tl.where(u < 1 / 64, series, _log2(1 - u) * -LN2)
    return _log2(exponential) * -LN2


def eager_gumbel(seed: int, counters: Tensor, first_id: int, V: int) -> Tensor:
    """Return the noise of counters [T] and V ids from first_id on, [T, V] fp64."""
    id = torch.arange(first_id, first_id + V, device=counters.device)
    column = ((id >> 4) << 2) | ((id >> 1) & 3)
    low = (counters & 0xFFFFFFFF)[:, None]
    high = ((counters >> 32) & 0xFFFFFFFF)[:, None]
    word = _philox(seed, column + 0 * low, low + 0 * column, high + 0 * column)
    place = (id & 1) | ((id >> 2) & 2)
    r = torch.stack(word).gather(0, place.expand_as(word[0])[None])[0]
    u = ((r.double() + 0.5) * 2.0**-32).clamp_max(_LARGEST_U.value)
    return -(-(-u).log1p()).log()


def _philox(seed: int, c0: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """Return the four words of Philox4x32, with c1 = 0, in int64."""
    mask = 0xFFFFFFFF
    c1 = torch.zeros_like(c0)
    k0 = seed & mask
    k1 = (seed >> 32) & mask
    for _ in range(ROUNDS):
        a_high, a_low = _product(0xD2511F53, c0)
        b_high, b_low = _product(0xCD9E8D57, c2)
        c0 = b_high ^ c1 ^ k0
        c1 = b_low
        c2 = a_high ^ c3 ^ k1
        c3 = a_low
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def _product(a: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a * x, both below 2^32, without overflow."""
    below = a * (x & 0xFFFF)
    above = a * (x >> 16)
    middle = (below >> 16) + (above & 0xFFFF)
    high = (above >> 16) + (middle >> 16)
    return high, ((middle & 0xFFFF) << 16) | (below & 0xFFFF)
