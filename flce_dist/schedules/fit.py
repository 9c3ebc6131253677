"""How many columns and tokens a schedule holds at a time: what fits into a budget of logits.

T = tokens, V = rows of the largest even shard.
"""

from typing import NamedTuple

from torch import SymInt, sym_max, sym_min

from flce_dist.kernels.grid import PLANNED
from flce_dist.schedules.in_forward import InForward, LentWindows
from flce_dist.schedules.windows import Windows

_WINDOW_BYTES = 264 << 20  # 16,896 columns of 8192 tokens in bf16
_MIN_WINDOW = 4096
_MAX_WINDOW = 33792
_WAVE = 64 * PLANNED.programs  # columns: GEMMs over a multiple fill the last wave of an H200, too
_TILE = 256  # columns or tokens: the kernels' largest tile, of which windows and chunks are made
_LEAST_CHUNK = 2048  # tokens of a chunk of auto, so that its GEMMs are large
_LENT_ROWS = 16  # of dweight: a window in its memory takes a multiple of them
_FIRST_LENT = 2048  # columns of the first of several windows in dweight's memory
_MOST_RECOMPUTED = 0.1  # of the columns of one chunk: beyond, accumulating several is faster

Plan = Windows | InForward


class Shape(NamedTuple):
    """Sizes and facts of a call that every plan follows from."""

    T: int
    V: int
    itemsize: int
    converts: bool
    row_bytes: int  # of a row of dweight, rounded at once; 0 if it lends none
    accumulator_row_bytes: int  # the same of one that accumulates chunks

    @property
    def column_bytes(self) -> int:
        return max(1, self.T * self.itemsize)


def widest_window(shape: Shape) -> int:
    window = sym_max(_MIN_WINDOW, _round_down(_WINDOW_BYTES // shape.column_bytes))
    return sym_min(_MAX_WINDOW, window)


def windows_within(shape: Shape, budget: int | None, limit: int | None, *, caches: bool) -> Windows:
    """Cache as many columns as fit into ``budget`` beside a window, or none.

    ``limit`` is the budget that the caller named, which a rank with more rows keeps, too.
    """
    T = shape.T
    V = shape.V
    converts = shape.converts
    column_bytes = shape.column_bytes
    window = widest_window(shape)
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
    return Windows(
        T=T,
        V=V,
        cached_v=cached,
        window_v=window,
        logits_bytes=held * column_bytes if T else 0,
        limit=limit,
        converts=converts,
    )


def in_forward_within(shape: Shape, budget: int) -> InForward | None:
    """Return in_forward with chunks, accumulator included, that fit into ``budget``; else None."""
    at_once = in_forward_of(shape, budget)
    if at_once.first_t == shape.T:
        return at_once
    if shape.converts:
        return None
    # The accumulator replaces dweight, and at the end exists together with it, rounded.
    rounded = shape.V * shape.row_bytes
    accumulator = shape.V * shape.accumulator_row_bytes
    left = budget - (accumulator - rounded)
    at_end = accumulator if accumulator > rounded else 0
    if left < _LEAST_CHUNK * shape.V * shape.itemsize or at_end > budget:
        return None
    return in_forward_of(shape, left)


def in_forward_of(shape: Shape, budget: int) -> InForward:
    """Take all tokens at once if they fit, with dweight's memory or without; else few chunks.

    A first chunk that lends is longer than the others only as far as that saves a chunk.
    """
    T = shape.T
    V = shape.V
    itemsize = shape.itemsize
    converts = shape.converts
    window = max(1, min(_MIN_WINDOW, V))
    held = V + (window if converts else 0)

    def in_chunks_of(chunk_t: int) -> InForward:
        return InForward(
            T=T,
            V=V,
            cached_v=V,
            window_v=window,
            logits_bytes=chunk_t * held * itemsize,
            limit=budget,
            converts=converts,
            first_t=sym_min(chunk_t, T),
            chunk_t=chunk_t,
        )

    if isinstance(T, SymInt):
        return in_chunks_of(T)  # the plan of a fake, to whose shapes chunks do not matter
    most = budget // max(1, held * itemsize)  # tokens of a chunk that does not lend
    if not 0 < T <= most:
        most = max(_TILE, _round_down(most))

    def even_chunk(tokens: int) -> int:
        """Return the size of the fewest chunks that so many tokens can be cut into evenly."""
        chunks = max(1, -(-tokens // most))
        return max(1, min(tokens, _round_up(-(-tokens // chunks))))

    # Lending pays if it saves a chunk: as few as possible come behind the one that lends.
    lends = shape.row_bytes and most < T and not converts
    for behind in range(-(-T // most) - 1) if lends else ():
        first_t = min(T, _round_up(max(T - behind * most, -(-T // (behind + 1)))))
        chunk_t = even_chunk(T - first_t) if behind else T
        lending = _lend(shape, first_t, chunk_t, budget)
        if lending is not None:
            return lending
    return in_chunks_of(even_chunk(T))


def _lend(shape: Shape, first_t: int, chunk_t: int, budget: int) -> InForward | None:
    """Fit a first chunk into ``budget`` by lending it dweight's memory; None if it does not fit."""
    T = shape.T
    V = shape.V
    itemsize = shape.itemsize
    row_bytes = shape.row_bytes
    most_recomputed = round(V * _MOST_RECOMPUTED)
    later_bytes = 0
    if first_t < T:  # only one of all tokens may compute columns again
        row_bytes = shape.accumulator_row_bytes
        most_recomputed = 0
        later_bytes = chunk_t * V * itemsize
    column_bytes = first_t * itemsize
    most = budget // column_bytes  # columns in memory of their own
    if most < 2 * _MIN_WINDOW or V <= 2 * _TILE:
        return None
    windows = _lent_windows(column_bytes, V, _round_up(V - most), row_bytes)
    lent = sum(columns for columns, _ in windows)
    cached = V
    window = _MIN_WINDOW
    if V - lent > most:
        cached = _round_down(lent + most - window)
    if not windows or V - cached > most_recomputed:
        return None
    held = cached - lent + (window if cached < V else 0)
    return InForward(
        T=T,
        V=V,
        cached_v=cached,
        window_v=window,
        logits_bytes=max(held * column_bytes, later_bytes),
        limit=budget,
        converts=shape.converts,
        first_t=first_t,
        chunk_t=chunk_t,
        lending=windows,
    )


def _lent_windows(column_bytes: int, V: int, wanted: int, row_bytes: int) -> LentWindows:
    """Place up to ``wanted`` columns in a dweight of V rows, in few windows in ascending order.

    In_forward finishes columns in ascending order, and after column n rows 0 to n of dweight are
    written. So a window may begin only at or beyond the row where the gradient of its last column
    ends. The first is small, so that little is left free below it; each later one may be as wide as
    what lies before it.
    """

    def rows_of(columns: int) -> int:
        return -(-columns * column_bytes // (_LENT_ROWS * row_bytes)) * _LENT_ROWS

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
            width = _round_down((V - row - _LENT_ROWS) * row_bytes // column_bytes)
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
