"""A logit and its id as one int64 key: the larger logit first, of equal ones the smaller id."""

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(1 << 63))  # of no id


@triton.jit
def ordered(x):
    """int32 of the order of fp32 x. -0 is 0; NaN is above or below all numbers."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def next_above(x):
    """The least fp32 number above x."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits + tl.where(bits < 0, -1, 1)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(x, id):
    """The key of logit x, fp32, and id, which is below 2^31; never LOWEST_KEY for a number."""
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - id).to(tl.int64)


@triton.jit
def logit_of(key):
    high = (key >> 32).to(tl.int32)
    return (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def kth_largest(x, k, STEPS: tl.constexpr):
    """The k-th largest of int32 x [N]; the lowest number if there are fewer.

    Only its first STEPS bits are found. The others are 0, which makes it a lower bound.
    """
    one = tl.full((), 1, tl.int32)
    least = one << 31
    for i in range(STEPS):
        more = least ^ (one << (31 - i))  # the first step leaves the negative numbers
        reached = tl.sum((x >= more).to(tl.int32), axis=0) >= k
        least = tl.where(reached, more, least)
    return least
