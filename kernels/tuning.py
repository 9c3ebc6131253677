"""Which tile for which chip: data, and a pure function that picks.

Measured on an H200 (bf16, T = 8192, H = 4096, V = 128256): 128 x 256 x 64 with 8 warps and 3
stages in a persistent grid runs at cuBLAS speed; 4 stages cost 5 %, 128 x 128 tiles 11 %. The
tiles of sm_80 and sm_100 are not measured: they fit and do not spill.
"""

import functools
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class TileConfig:
    """Tile of ``hidden @ weight.T``, and how the compiler is to schedule it."""

    BLOCK_T: int
    BLOCK_V: int
    BLOCK_H: int
    GROUP_T: int
    num_warps: int
    num_stages: int


INTERPRETED = "interpreted"

# (chip, bytes of an operand) -> tile.
_TILES = {
    ("sm_80", 2): TileConfig(128, 128, 32, 8, 8, 3),
    ("sm_80", 4): TileConfig(64, 64, 32, 8, 4, 3),
    ("sm_90", 2): TileConfig(128, 256, 64, 8, 8, 3),
    ("sm_90", 4): TileConfig(64, 64, 32, 8, 8, 3),
    ("sm_100", 2): TileConfig(128, 128, 64, 8, 8, 4),
    ("sm_100", 4): TileConfig(64, 64, 32, 8, 8, 3),
    # One step of the interpreter costs the same for any tile: few, odd-sized enough to be ragged.
    (INTERPRETED, 2): TileConfig(32, 64, 32, 2, 4, 1),
    (INTERPRETED, 4): TileConfig(32, 64, 32, 2, 4, 1),
}


def tile_config(arch: str, itemsize: int, T: int) -> TileConfig:
    """Return the tile for ``arch`` ("sm_90"), operands of ``itemsize`` bytes and T tokens."""
    config = _TILES[arch, itemsize]
    if arch == INTERPRETED or T > 64 or itemsize == 4:
        return config
    # A small T fills 64 rows at best; tiles are then spread over the vocabulary alone.
    return TileConfig(64, config.BLOCK_V, config.BLOCK_H, 1, 4, config.num_stages)


def all_configs() -> list[tuple[str, int, TileConfig]]:
    """Every ``(arch, itemsize, config)`` that a GPU may be given, for ahead-of-time checks."""
    configs = {
        (arch, itemsize, tile_config(arch, itemsize, T)): None
        for arch, itemsize in _TILES
        if arch != INTERPRETED
        for T in (64, 8192)
    }
    return list(configs)


def has_tma(arch: str) -> bool:
    """Whether tiles travel by tensor descriptors there."""
    return arch != "sm_80"


@functools.lru_cache
def device_arch(device: torch.device) -> tuple[str, int]:
    """Return ``(arch, programs of a persistent grid)``; newer chips use the nearest older tile."""
    if triton.knobs.runtime.interpret:
        return INTERPRETED, 4
    properties = torch.cuda.get_device_properties(device)
    known = {8: "sm_80", 9: "sm_90"}
    return known.get(properties.major, "sm_100"), properties.multi_processor_count
