"""What terms of a divergence's sums and of its D are made of: ``formulas.py`` in Triton."""

import triton
import triton.language as tl

from flce_dist.kernels.primitives import exp, log1p_series


@triton.jit
def expm1(x):
    """``exp(x) - 1`` with the relative accuracy of x; the next term of the series is below 1e-8."""
    series = x * (1 / 5040)
    series = x * (1 / 720 + series)
    series = x * (1 / 120 + series)
    series = x * (1 / 24 + series)
    series = x * (1 / 6 + series)
    series = x * (1 + x * (1 / 2 + series))
    return tl.where(tl.abs(x) < 0.25, series, exp(x) - 1)


@triton.jit
def _log1p_below_0(x):
    """``log(1 + x)`` for x <= 0, with the relative accuracy of x near 0."""
    series = log1p_series(x)
    return tl.where(x > -0.5, series, tl.log(1 + x))


@triton.jit
def log_ratios(d, beta):
    """``log(q / m)`` and ``log(p / m)``: of the larger of p and q one logarithm, near 0."""
    distance = tl.abs(d)
    of_larger = -_log1p_below_0(tl.where(d > 0, beta, 1 - beta) * expm1(-distance))
    of_smaller = of_larger - distance
    return tl.where(d > 0, of_smaller, of_larger), tl.where(d > 0, of_larger, of_smaller)


@triton.jit
def weighted(p, x):
    """p x, but 0 where p is 0: there x may be infinite or NaN."""
    return tl.where(p == 0.0, 0.0, p * x)
