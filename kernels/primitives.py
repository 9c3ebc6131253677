"""Device functions that several kernels share.  T = tokens, V = rows here, H = hidden size."""

import triton
import triton.language as tl

from flce_dist.kernels.rows import formulas

# The interpreter multiplies the raw bits of bf16 operands and truncates bf16 stores, silently.
INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
_LOWEST = tl.constexpr(formulas.LOWEST)
_RESCUE_ABOVE = tl.constexpr(formulas.RESCUE_ABOVE)
FAR = tl.constexpr(formulas.FAR)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def parts_of(tile, block):
    """How many blocks a tile has; as a plain number in the interpreter, too."""
    return tile // block


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in fp32: tensor cores for half operands, IEEE arithmetic for fp32."""
    if INTERPRET:
        # tl.dot calls a BLAS there, whose rounding may depend on an element's place in the tile.
        products = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        return acc + tl.sum(products, axis=1)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def cast(x, dtype: tl.constexpr):
    """fp32 ``x`` rounded to nearest even in ``dtype``."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def finite(reference):
    """As in ``formulas.py``."""
    return tl.where(reference == -float("inf"), 0.0, reference)


@triton.jit
def first_reference(label_logit):
    """As in ``formulas.py``."""
    return tl.where(label_logit < _LOWEST, 0.0, label_logit)


@triton.jit
def is_rescued(label_logit, others_max):
    """As in ``formulas.py``."""
    return (others_max - label_logit > _RESCUE_ABOVE) | (label_logit < _LOWEST)


@triton.jit
def rescued_reference(label_logit, others_max):
    """As in ``formulas.py``."""
    return finite(tl.maximum(others_max, label_logit))


@triton.jit
def softcap_tanh(z, softcap):
    """``softcap * tanh(z / softcap)``."""
    # Where the argument is small a quotient of exponentials loses relative accuracy. The next term
    # of the Taylor series is below 1e-8 of the value there.
    x = z / softcap
    s = x * x
    series = x * (1 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    t = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    quotient = (1 - t) / (1 + t)
    quotient = tl.where(x < 0, -quotient, quotient)
    return softcap * tl.where(tl.abs(x) < 0.25, series, quotient)


@triton.jit
def softcap_slope(z, softcap, inverse_temperature):
    """Derivative of the softcap, from z, the capped logit divided by the temperature."""
    capped = z / (softcap * inverse_temperature)
    return 1 - capped * capped


@triton.jit
def load_tile(
    src, row, col, num_rows, num_cols, stride_row, stride_col,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load a [BLOCK_ROW, BLOCK_COL] tile of a matrix, 0 outside; src is a descriptor if TMA."""
    if TMA:
        return src.load([row, col])
    else:
        # V * H passes 2**31 at 262k x 8k, along columns where these have the long stride.
        offs_row = row + tl.arange(0, BLOCK_ROW).to(tl.int64)
        offs_col = col + tl.arange(0, BLOCK_COL).to(tl.int64)
        return tl.load(
            src + offs_row[:, None] * stride_row + offs_col[None, :] * stride_col,
            mask=(offs_row[:, None] < num_rows) & (offs_col[None, :] < num_cols),
            other=0.0,
        )


@triton.jit
def store_tile(
    dst, tile, row, col, num_rows, num_cols, stride_row,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Store fp32 ``tile`` into a matrix of unit column stride; dst is a descriptor if TMA."""
    if TMA:
        dst.store([row, col], cast(tile, dst.dtype))
    else:
        offs_row = row + tl.arange(0, BLOCK_ROW).to(tl.int64)  # T * V passes 2**31 at 16k x 128k
        offs_col = col + tl.arange(0, BLOCK_COL)
        tl.store(
            dst + offs_row[:, None] * stride_row + offs_col[None, :],
            cast(tile, dst.dtype.element_ty),
            mask=(offs_row[:, None] < num_rows) & (offs_col[None, :] < num_cols),
        )


@triton.jit
def halves(x):
    """The left and the right half of a tile's columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def add_tile(dst_ptr, tile, row, col, num_rows, num_cols, stride_row, ADDS: tl.constexpr):
    """Add fp32 ``tile`` to a matrix of unit column stride with one rounding; store it unless ADDS.

    Half of the columns at a time: the registers hold no second tile of a GEMM's size.
    """
    WIDTH: tl.constexpr = tile.shape[1] // 2
    left, right = halves(tile)
    offs_row = row + tl.arange(0, tile.shape[0])
    for i in tl.static_range(2):
        offs_col = col + i * WIDTH + tl.arange(0, WIDTH)
        mask = (offs_row[:, None] < num_rows) & (offs_col[None, :] < num_cols)
        # V * H passes 2**31 at 524k x 4k
        ptrs = dst_ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_col[None, :]
        total = left if i == 0 else right
        if ADDS:
            total += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(ptrs, cast(total, dst_ptr.dtype.element_ty), mask=mask)


@triton.jit
def tile_coordinates(tile, num_t, num_v, GROUP_T: tl.constexpr):
    """Tile number to ``(pid_t, pid_v)``: GROUP_T token blocks share a column of weight in L2.

    A few blocks that are left join the last group: alone they would read all of weight once more.
    """
    last = tl.maximum((num_t + GROUP_T // 2) // GROUP_T, 1) - 1
    group = tl.minimum(tile // (GROUP_T * num_v), last)
    first_t = group * GROUP_T
    rows = tl.where(group < last, GROUP_T, num_t - first_t)
    tile -= first_t * num_v
    return first_t + tile % rows, tile // rows


@triton.jit
def log1p(x):
    """``log(1 + x)`` with the relative accuracy of x, which log(1 + x) loses near 0.

    x >= 0, or -1, whose result is -inf.
    """
    series = log1p_series(x)
    return tl.where(tl.abs(x) < 1, series, tl.log(1 + x))


@triton.jit
def log1p_series(x):
    """``log1p`` for -0.5 <= x <= 1."""
    # 2 atanh(s) with |s| = |x / (2 + x)| <= 1 / 3; the next term is below 2e-10 of the sum.
    s = x / (2 + x)
    q = s * s
    series = 1 / 9 + q * (1 / 11 + q * (1 / 13 + q * (1 / 15 + q / 17)))
    return 2 * s * (1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * series))))


@triton.jit
def computed(count_ptr, T):
    """How many of T tokens are computed: all, or those below the count, which may lie outside."""
    if count_ptr is None:
        return T
    else:
        return tl.maximum(tl.minimum(tl.load(count_ptr), T), 0)


@triton.jit
def times_exponent(e, x):
    """``e * x``, but 0 in excluded columns, where e is 0 and x is -inf: their product is NaN."""
    return tl.where(x == -float("inf"), 0.0, e * x)
