"""Sums whose bits do not depend on the order of their terms.  T = tokens, N = terms of a token.

A sum that is rounded after each addition depends on where a shard begins, how its columns are cut
and on the number of ranks. So only a group of neighbouring columns, a tile or GROUP_V of them, is
added in fp32, always in one order. Such a *term* is cut into slices, which are added exactly.

Bin b holds multiples of ``unit(b) = 2 ** (BIN_BITS * b + headroom)``. The slice of a term in its
top bin is the nearest such multiple. The remainder is sliced in the bin below, and so on through 2
or 3 bins; what is left then is dropped. A *limb* is the sum of the slices of one bin, in fp64. Its
additions are exact: it stays below 2 ** 53 units for up to 2 ** 20 columns of all ranks.

The top bin b of a token is that of its largest exponential m so far, the b with
``2 ** (BIN_BITS * b) <= m < 2 ** (BIN_BITS * (b + 1))``. Terms are at most
``2 ** (headroom - 2) * m``, less than half a unit of bin b + 1, so their slices in higher bins are
0. When later columns or other ranks raise the top bin, limbs therefore move down, zeros take the
places above, and each limb is what it would be had m been known before.

At most half a unit of the lowest bin is dropped of a term: with groups of 32 columns 2 ** -32 of m
with 2 limbs, 2 ** -63 with 3; with groups of 256 columns 2 ** -29 and 2 ** -60. NaN is kept: a limb
that moves out is multiplied by 0, not replaced.
"""

import triton
import triton.language as tl

from flce_dist.kernels.primitives import LOG2E

BIN_BITS = tl.constexpr(38)
_BINS_PER_NAT = tl.constexpr(LOG2E.value / BIN_BITS.value)
_SUM_Z_UNIT = tl.constexpr(2.0**-16)


@triton.constexpr_function
def headroom(group_v, limbs):
    """log2 of ``unit(b) / 2 ** (BIN_BITS * b)``."""
    # 3 limbs have terms exp(x) * x, where |x| is at most 104 if fp32 exp(x) is not 0.
    return group_v.bit_length() + (8 if limbs == 3 else 1)


@triton.jit
def group_sums(x, GROUP_V: tl.constexpr):
    """Sums of GROUP_V columns in one order: [BLOCK_T, BLOCK_V] to [BLOCK_T, BLOCK_V // GROUP_V]."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // GROUP_V, GROUP_V)), axis=2)


@triton.jit
def top_bin(others_max, reference):
    """The bin, int32, of the largest exponential relative to the token's reference."""
    # Comparisons with NaN are false. fp32 holds no exponential below exp(-104); rows above exp(50)
    # are rescued, and then relative to their maximum.
    nats = others_max - reference
    nats = tl.where(nats > -120.0, nats, -120.0)
    nats = tl.where(nats < 120.0, nats, 120.0)
    return tl.floor(nats * _BINS_PER_NAT).to(tl.int32)


@triton.jit
def nearest_multiple(x, unit):
    """The multiple of ``unit``, a power of 2, that is nearest to x fp64; |x| < 2 ** 51 units."""
    # fp64 numbers near this one are one unit apart, so that adding it rounds x to a multiple.
    far = 6755399441055744.0 * unit  # 1.5 * 2 ** 52
    return (x + far) - far


@triton.jit
def slice_in(x, bin, HEADROOM: tl.constexpr):
    """The multiple of the bin's unit that is nearest to x, in fp64; |x| is below 2 ** 51 units."""
    exponent = (bin * BIN_BITS + (HEADROOM + 1023)).to(tl.int64)
    return nearest_multiple(x, (exponent << 52).to(tl.float64, bitcast=True))


@triton.jit
def slice_sums(terms, bin, GROUP_V: tl.constexpr, LIMBS: tl.constexpr):
    """Limbs ``(high, middle, low)``, [T] fp64, of fp32 terms [N, T]; middle is 0 if LIMBS is 2."""
    HEADROOM: tl.constexpr = headroom(GROUP_V, LIMBS)
    remainder = terms.to(tl.float64)
    part = slice_in(remainder, bin[None, :], HEADROOM)
    high = tl.sum(part, axis=0)
    remainder -= part
    middle = high * 0.0
    if LIMBS == 3:
        part = slice_in(remainder, bin[None, :] - 1, HEADROOM)
        middle = tl.sum(part, axis=0)
        remainder -= part
    low = tl.sum(slice_in(remainder, bin[None, :] - (LIMBS - 1), HEADROOM), axis=0)
    return high, middle, low


@triton.jit
def load_limbs(sums_ptr, stride, offs_t, mask, LIMBS: tl.constexpr):
    """Load ``(high, middle, low)`` from LIMBS rows of [rows, T] fp64; middle is 0 if LIMBS is 2."""
    high = tl.load(sums_ptr + offs_t, mask=mask, other=0.0)
    middle = high * 0.0
    if LIMBS == 3:
        middle = tl.load(sums_ptr + stride + offs_t, mask=mask, other=0.0)
    low = tl.load(sums_ptr + (LIMBS - 1) * stride + offs_t, mask=mask, other=0.0)
    return high, middle, low


@triton.jit
def store_limbs(sums_ptr, stride, offs_t, mask, high, middle, low, LIMBS: tl.constexpr):
    tl.store(sums_ptr + offs_t, high, mask=mask)
    if LIMBS == 3:
        tl.store(sums_ptr + stride + offs_t, middle, mask=mask)
    tl.store(sums_ptr + (LIMBS - 1) * stride + offs_t, low, mask=mask)


@triton.jit
def lower_limbs(high, middle, low, bins, LIMBS: tl.constexpr):
    """The limbs of the same sum after its top bin has risen by ``bins`` >= 0."""
    none = high * 0.0
    if LIMBS == 3:
        low = tl.where(bins == 0, low, tl.where(bins == 1, middle, tl.where(bins == 2, high, none)))
        middle = tl.where(bins == 0, middle, tl.where(bins == 1, high, none))
    else:
        low = tl.where(bins == 0, low, tl.where(bins == 1, high, none))
    return tl.where(bins == 0, high, none), middle, low


@triton.jit
def sum_z_slice(x):
    """Multiples of 2 ** -16, whose sums are exact up to a mean of 2 ** 17 over 2 ** 20 columns."""
    return nearest_multiple(x.to(tl.float64), _SUM_Z_UNIT)
