"""How many tokens one launch of best ids takes: sizes alone, without a device.

T = tokens, V = vocabulary rows here, k = ids of a token.
"""

from flce_dist.kernels.grid import Grid

LOGITS_BYTES = 345 << 20
"""Limit of a chunk's fp32 logits. 640 tokens of 128,256 columns are 313 MiB; 1408 tokens of half of
them 344 MiB, and fill 20.9 waves of 132 tiles, where 1280 tokens, 313 MiB, took 20 for 19.02."""

PART_BYTES = 64 << 20
"""Limit of a chunk's partial statistics: 8192 tokens of 501 tiles, 8 bytes each, are 31 MiB."""


def chunk_tokens(T: int, V: int, k: int, *, counts: bool, grid: Grid) -> int:
    """Return how many tokens one launch takes: what memory holds, in whole waves of the grid.

    ``counts`` tells whether ids above the label's are counted.
    """
    num_v = -(-V // grid.tile_v)
    rows = num_v * (2 * grid.groups + 2 * (k == 1) + counts)
    most = PART_BYTES // (4 * max(1, rows))
    if k > 1:
        most = min(most, LOGITS_BYTES // (4 * max(1, V)))
    if most >= T or most < grid.tile_t:
        return max(1, min(most, T))
    blocks = most // grid.tile_t
    in_whole_tiles = [n * grid.tile_t for n in range(blocks, blocks // 2, -1)]
    return min(in_whole_tiles, key=lambda tokens: grid.idle_share(tokens, V))
