"""Tiles of logits, and how many a GPU computes at a time: sizes alone, without a device.

T = tokens, V = vocabulary rows here.
"""

from typing import NamedTuple


class Grid(NamedTuple):
    tile_t: int  # tokens of a tile
    tile_v: int  # its columns
    programs: int  # tiles that are computed at a time: a wave
    groups: int = 1  # of columns in a tile, which have statistics of their own

    def tiles(self, T: int, V: int) -> int:
        return -(-T // self.tile_t) * -(-V // self.tile_v)

    def waves(self, T: int, V: int) -> int:
        return -(-self.tiles(T, V) // self.programs)

    def idle_share(self, T: int, V: int) -> float:
        """Return the tiles that the last wave lacks, per tile."""
        tiles = self.tiles(T, V)
        return -tiles % self.programs / tiles


PLANNED = Grid(tile_t=128, tile_v=256, programs=132)
"""That of an H100 or H200 in bf16. Plans count with it on any device, since ranks must agree."""
