"""The tiles of filtered gradients: TILE_T tokens by TILE_V vocabulary rows."""

TILE_T = 128
TILE_V = 256
SAMPLE = 128  # tokens from which the profile of the tiles is taken, or all that count


def tile_grid(T: int, V: int) -> tuple[int, int]:
    """Return the blocks of tokens and the tiles of vocabulary rows."""
    return -(-T // TILE_T), -(-V // TILE_V)
