"""The tiles of filtered gradients, and how many of them exist at one time.

T = tokens, V = vocabulary rows here. A tile is ``TILE_T`` tokens by ``TILE_V`` rows.
"""

TILE_T, TILE_V = 128, 256
SAMPLE = 128  # tokens from which the profile of the tiles is taken, or all that count


def tile_grid(T: int, V: int) -> tuple[int, int]:
    """Return the blocks of tokens and the tiles of vocabulary rows."""
    return -(-T // TILE_T), -(-V // TILE_V)


def round_count(T: int, V: int, capacity: int) -> int:
    """Return the rounds that suffice whichever tiles are kept, ``capacity`` tiles at a time.

    A round holds whole columns of tiles, so it may be short of full by almost one column.
    """
    blocks, columns = tile_grid(T, V)
    if capacity >= blocks * columns:
        return 1
    return -(-blocks * columns // (capacity - blocks))
