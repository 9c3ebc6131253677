"""Which columns of the logits are cached, which are recomputed, and how many tokens at a time.

A pure function of facts that all ranks share, so all plan alike and issue the same collectives.
Compilers plan for a symbolic T: ``sym_min`` compares without deciding, so a graph serves all T.
T = tokens, V = rows of the largest even shard.
"""

from typing import NamedTuple

from torch import sym_max, sym_min

from flce_dist.arguments.options import ScheduleName
from flce_dist.schedules.in_forward import InForward, LentWindows
from flce_dist.schedules.windows import Windows

DEFAULT_LOGITS_BYTES = 1 << 30
"""Budget of ``auto`` and ``in_forward`` where the caller names none, unless they need more."""

FROZEN_LOGITS_BYTES = 1 << 28
"""The same where hidden alone needs a gradient: chunks add to no dweight, so many cost nothing."""

FEW_COLUMNS = 1024
"""Vocabulary entries up to which fp16's ``auto`` caches nothing: a cache of exponentials is bf16,
whose rounding does not average out over so few. To compute their logits again costs little."""

_MANY_TOKENS = 16384  # tokens up to which auto, given no budget, takes all at once
_WINDOW_BYTES = 264 << 20  # 16,896 columns of 8192 tokens in bf16
_MIN_WINDOW = 4096
_MAX_WINDOW = 33792
_WAVE = 8448  # columns, 64 * 132: GEMMs over a multiple fill the last wave of an H200, too
_TILE = 256  # columns or tokens: the kernels' largest tile, of which windows and chunks are made
_LEAST_CHUNK = 2048  # tokens of a chunk of auto, so that its GEMMs are large
_FIRST_LENT = 2048  # columns of the first of several windows in dweight's memory
_MOST_RECOMPUTED = 0.1  # of the columns of one chunk: beyond, accumulating several is faster

Plan = Windows | InForward


def choose_schedule(
    *,
    T: int,
    V: int,
    itemsize: int,
    schedule: ScheduleName,
    max_logits_bytes: int | None,
    expressible: bool = True,
    converts: bool = False,
    dweight_row_bytes: tuple[int, int] = (0, 0),
    reduces: bool = False,
    frozen: bool = False,
) -> Plan:
    """Choose what to cache and what to recompute; docs/design.md says how ``auto`` does.

    Args:
        itemsize: bytes of one cached exponential.
        schedule: ``cached`` caches what fits, everything if no budget is given; ``recompute``
            nothing; ``in_forward`` takes all tokens at once if they fit with what dweight's own
            memory can hold, else chunks of them that fit; without a budget what ``auto`` would.
        max_logits_bytes: bound on cache plus window, per rank. 256 columns or tokens are taken even
            where they exceed it.
        expressible: whether cached exponentials express the gradient, and as accurately as the
            operands' dtype; if not, ``auto`` recomputes.
        converts: whether cached columns pass through a window of the operands' dtype (fp16).
        dweight_row_bytes: bytes of one row of dweight in in_forward, rounded at once and
            accumulating over chunks; 0 if it lends none.
        reduces: whether one scalar upstream gradient is all that backward can bring.
        frozen: whether hidden alone needs a gradient, and that of the loss alone can arrive.
    """
    shape = _Shape(T, V, itemsize, converts, *dweight_row_bytes)
    if schedule == "cached":
        return _windows(shape, max_logits_bytes, max_logits_bytes, caches=True)
    if schedule == "recompute":
        return _windows(shape, max_logits_bytes, max_logits_bytes, caches=False)
    default = DEFAULT_LOGITS_BYTES
    if schedule == "auto" and not expressible:
        return _windows(shape, max_logits_bytes or default, max_logits_bytes, caches=False)
    if frozen:
        return _in_forward(shape, max_logits_bytes or FROZEN_LOGITS_BYTES)
    if schedule == "in_forward" and (max_logits_bytes is not None or not shape.row):
        return _in_forward(shape, max_logits_bytes or default)  # no dweight to accumulate

    caches = schedule == "auto"
    reduces = reduces or schedule == "in_forward"
    budget = max_logits_bytes or sym_max(default, _spares_a_gemm(shape, reduces))
    once = None
    if max_logits_bytes is None:
        once = _computing_once(
            shape, default, None, caches=caches, reduces=reduces, accumulates=False
        )
    if once is None:
        once = _computing_once(
            shape, budget, max_logits_bytes, caches=caches, reduces=reduces, accumulates=True
        )
    if once is not None:
        return once
    if caches:
        return _windows(shape, budget, max_logits_bytes, caches=True)
    return _in_forward(shape, default)


class _Shape(NamedTuple):
    T: int
    V: int
    itemsize: int
    converts: bool
    row: int  # bytes of a row of dweight, rounded at once; 0 if it lends none
    accumulator_row: int  # the same of one that accumulates chunks

    @property
    def column_bytes(self) -> int:
        return max(1, self.T * self.itemsize)


def _computing_once(
    shape: _Shape,
    budget: int,
    limit: int | None,
    *,
    caches: bool,
    reduces: bool,
    accumulates: bool,
) -> Plan | None:
    """Return a plan within ``budget`` that computes no logits again; None if there is none.

    For example 8192 tokens of 128,256 columns in bf16: within 1 GiB a cache does not fit, and
    in_forward does, with half of dweight's memory. ``accumulates`` says whether it may also take
    chunks of tokens that cost a pass over dweight's accumulator each.
    """
    if caches:
        windows = _windows(shape, budget, limit, caches=True)
        if windows.cached_v == shape.V:
            return windows
    in_forward = _auto_in_forward(shape, budget) if reduces else None
    if in_forward is None or accumulates or shape.row == shape.accumulator_row:
        return in_forward
    return in_forward if len(in_forward.chunks()) == 1 else None


def _spares_a_gemm(shape: _Shape, reduces: bool) -> int:
    """Return the least bytes with which ``auto`` computes no logits again."""
    T = shape.T
    V = shape.V
    itemsize = shape.itemsize
    window = _widest_window(shape) if shape.converts else 0
    budgets = [2 * (V + window) * sym_min(T, _MANY_TOKENS)]  # exponentials of 16 bits
    if reduces and not shape.converts:
        # In_forward takes less: half of dweight holds some of them, or chunks accumulate dweight.
        budgets.append(V * (T * itemsize - min(T * itemsize, shape.row) // 2))
        if T >= 2 * _MANY_TOKENS:
            chunk = _MANY_TOKENS // 2 * itemsize
            most = max(chunk + shape.accumulator_row - shape.row, shape.accumulator_row)
            budgets.append(V * most)
    return min(budgets)


def _widest_window(shape: _Shape) -> int:
    window = sym_max(_MIN_WINDOW, _round_down(_WINDOW_BYTES // shape.column_bytes))
    return sym_min(_MAX_WINDOW, window)


def _windows(shape: _Shape, budget: int | None, limit: int | None, *, caches: bool) -> Windows:
    """Cache as many columns as fit into ``budget`` beside a window, or none."""
    T = shape.T
    V = shape.V
    converts = shape.converts
    column_bytes = shape.column_bytes
    window = _widest_window(shape)
    cached = V if caches else 0
    if budget is not None:
        columns = budget // column_bytes
        if caches:  # what is cached gets the larger part, as long as windows are not too narrow
            columns = sym_max(columns * 3 // 10, sym_min(columns, min(_MIN_WINDOW, V // 4)))
        window = sym_min(window, sym_max(_TILE, _round_down(columns)))
    whole_waves = window - window % _WAVE
    window = sym_max(whole_waves, sym_min(window, _WAVE))  # or less than one
    window = sym_max(1, sym_min(window, V))
    if caches and budget is not None and (V + (window if converts else 0)) * column_bytes > budget:
        cached = max(0, _round_down((budget - window * column_bytes) // column_bytes))
    held = cached + (window if cached < V or converts else 0)
    return Windows(T, V, cached, window, held * column_bytes if T else 0, limit, converts)


def _auto_in_forward(shape: _Shape, budget: int) -> InForward | None:
    """Return in_forward with chunks, accumulator included, that fit into ``budget``; else None."""
    at_once = _in_forward(shape, budget)
    if at_once.first_t == shape.T:
        return at_once
    # The accumulator replaces dweight, and at the end exists together with it, rounded.
    rounded = shape.V * shape.row
    accumulator = shape.V * shape.accumulator_row
    left = budget - (accumulator - rounded)
    at_end = accumulator if accumulator > rounded else 0
    if shape.converts or left < _LEAST_CHUNK * shape.V * shape.itemsize or at_end > budget:
        return None
    return _in_forward(shape, left)


def _in_forward(shape: _Shape, budget: int) -> InForward:
    """Take all tokens at once if they fit, with dweight's memory or without; else few chunks.

    A first chunk that lends is longer than the others only as far as that saves a chunk.
    """
    T = shape.T
    V = shape.V
    itemsize = shape.itemsize
    converts = shape.converts
    window = max(1, min(_MIN_WINDOW, V))
    held = V + (window if converts else 0)
    chunk = budget // max(1, held * itemsize)
    if not 0 < T <= chunk:
        chunk = max(_TILE, _round_down(chunk))

    def later(tokens: int) -> int:
        chunks = max(1, -(-tokens // chunk))
        return max(1, min(tokens, _round_up(-(-tokens // chunks))))

    lends = shape.row and chunk < T and not converts
    for more in range(-(-T // chunk) - 1) if lends else ():  # chunks after the first
        first_t = min(T, _round_up(max(T - more * chunk, -(-T // (more + 1)))))
        fits = _lend(shape, first_t, later(T - first_t) if more else T, budget)
        if fits is not None:
            return fits
    chunk = later(T)
    sizes = (V, window, chunk * held * itemsize)
    return InForward(T, V, *sizes, budget, converts, min(chunk, T), chunk)


def _lend(shape: _Shape, first_t: int, chunk_t: int, budget: int) -> InForward | None:
    """Fit a first chunk into ``budget`` by lending it dweight's memory; None if it does not fit."""
    T = shape.T
    V = shape.V
    itemsize = shape.itemsize
    row_bytes = shape.row
    most_recomputed = round(V * _MOST_RECOMPUTED)
    later_bytes = 0
    if first_t < T:  # only one of all tokens may compute columns again
        row_bytes = shape.accumulator_row
        most_recomputed = 0
        later_bytes = chunk_t * V * itemsize
    column_bytes = first_t * itemsize
    columns = budget // column_bytes
    if columns < 2 * _MIN_WINDOW or V <= 2 * _TILE:
        return None
    windows = _lent_windows(column_bytes, V, _round_up(V - columns), row_bytes)
    lent = sum(columns for columns, _ in windows)
    cached = V
    window = _MIN_WINDOW
    if V - lent > columns:
        cached = _round_down(lent + columns - window)
    if not windows or V - cached > most_recomputed:
        return None
    held = cached - lent + (window if cached < V else 0)
    sizes = (cached, window, max(held * column_bytes, later_bytes))
    return InForward(T, V, *sizes, budget, shape.converts, first_t, chunk_t, windows)


def _lent_windows(column_bytes: int, V: int, wanted: int, row_bytes: int) -> LentWindows:
    """Place up to ``wanted`` columns in a dweight of V rows, in few windows in ascending order.

    In_forward finishes columns in ascending order, and after column n rows 0 to n of dweight are
    written. So a window may begin only at or beyond the row where the gradient of its last column
    ends. The first is small, so that little is left free below it; each later one may be as wide as
    what lies before it.
    """

    def rows_of(columns: int) -> int:
        return -(-columns * column_bytes // (16 * row_bytes)) * 16

    windows: list[tuple[int, int]] = []
    done = end = 0  # columns placed, rows taken
    while done < wanted:
        width = min(wanted - done, _round_down(end - done))
        if not windows:
            # All at once, or as wide as leaves enough rows for the rest.
            fits_at_once = wanted + rows_of(wanted) <= V
            leaving_rows = _round_down(V - rows_of(wanted) - _TILE)
            width = wanted if fits_at_once else max(_FIRST_LENT, leaving_rows)
        row = max(end, done + width)
        if row + rows_of(width) > V:
            width = _round_down((V - row - 16) * row_bytes // column_bytes)
        if width < _TILE:
            break
        windows.append((width, row))
        done = done + width
        end = row + rows_of(width)
    return tuple(windows)


def _round_down(n: int) -> int:
    return n // _TILE * _TILE


def _round_up(n: int) -> int:
    return -_round_down(-n)
