"""Exponentials in the memory of dweight, which in_forward writes last; docs/design.md has more.

Columns are finished in ascending order, and after column n rows 0 to n of dweight are written. So
a window of columns may begin only at or beyond the row where the gradient of its last column ends.
"""

LentWindows = tuple[tuple[int, int], ...]  # (columns, row of dweight where they lie)

FIRST_LENT = 2048  # columns of the first of several windows


def lent_windows(
    column_bytes: int, V: int, wanted: int, row_bytes: int, *, tile: int
) -> LentWindows:
    """Place up to ``wanted`` columns in a dweight of V rows, in few windows in ascending order.

    The first is small, so that little is left free below it; each later one may be as wide as what
    lies before it.
    """

    def rows_of(columns: int) -> int:
        return -(-columns * column_bytes // (16 * row_bytes)) * 16

    def round_down(columns: int) -> int:
        return columns // tile * tile

    windows: list[tuple[int, int]] = []
    done = end = 0  # columns placed, rows taken
    while done < wanted:
        width = min(wanted - done, round_down(end - done))
        if not windows:
            # All at once, or as wide as leaves enough rows for the rest.
            whole = wanted + rows_of(wanted) <= V
            width = wanted if whole else max(FIRST_LENT, round_down(V - rows_of(wanted) - tile))
        row = max(end, done + width)
        if row + rows_of(width) > V:
            width = round_down((V - row - 16) * row_bytes // column_bytes)
        if width < tile:
            break
        windows.append((width, row))
        done, end = done + width, row + rows_of(width)
    return tuple(windows)
