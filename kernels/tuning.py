"""Tile sizes per GPU architecture: data, and a pure function that chooses.

Measured on an H200 (bf16, T = 8192, H = 4096, V = 128256): 128 x 256 x 64 runs at cuBLAS speed,
128 x 128 tiles cost 11 %, 256 x 128 tiles 13 %, other groups of token blocks than 8 up to 4 %.
Those of other architectures are not measured: they fit into shared memory and do not spill.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton


@dataclass(frozen=True)
class TileConfig:
    """Tile of ``hidden @ weight.T``, and how the compiler is to schedule it, as launch options."""

    BLOCK_T: int
    BLOCK_V: int
    BLOCK_H: int
    GROUP_T: int
    num_warps: int
    num_stages: int


INTERPRETED = "interpreted"

# (architecture, bytes of an operand's element) -> tile.
TILES = {
    ("sm_80", 2): TileConfig(128, 128, 32, 8, 8, 3),
    ("sm_80", 4): TileConfig(64, 64, 32, 8, 4, 3),
    ("sm_90", 2): TileConfig(128, 256, 64, 8, 8, 3),
    ("sm_90", 4): TileConfig(64, 64, 32, 8, 8, 3),
    ("sm_100", 2): TileConfig(128, 128, 64, 8, 8, 4),
    ("sm_100", 4): TileConfig(64, 64, 32, 8, 8, 3),
    ("sm_120", 2): TileConfig(128, 128, 32, 8, 8, 3),
    ("sm_120", 4): TileConfig(64, 64, 32, 8, 8, 3),
    # Large enough for few steps, small enough that the sizes of tests do not fill the last tile.
    (INTERPRETED, 2): TileConfig(32, 64, 32, 2, 4, 1),
    (INTERPRETED, 4): TileConfig(32, 64, 32, 2, 4, 1),
}

LARGEST_TILE_T = max(config.BLOCK_T for config in TILES.values())
"""Tokens up to which D beyond those that count is 0, since a tile of any kernel may read it."""

# With one block of tokens each row of weight is read once, and the bytes in flight decide.
_ONE_BLOCK = {
    ("sm_80", 2): TileConfig(64, 128, 32, 1, 4, 3),
    ("sm_90", 2): TileConfig(64, 256, 64, 1, 4, 4),
    ("sm_100", 2): TileConfig(64, 128, 64, 1, 4, 4),
    ("sm_120", 2): TileConfig(64, 128, 32, 1, 4, 3),
}


@functools.lru_cache
def tile_config(arch: str, itemsize: int, T: int, stores: bool) -> TileConfig:
    """Return the tile; a kernel that ``stores`` tiles has less shared memory for its stages."""
    config = TILES[arch, itemsize]
    if T <= 64:
        config = _ONE_BLOCK.get((arch, itemsize), config)
    if arch == "sm_90" and itemsize == 2 and T <= config.BLOCK_T and not stores:
        config = replace(config, num_stages=config.num_stages + 1)
    return config


def arch_of(major: int, shared_bytes: int) -> str:
    """Return the architecture whose tiles fit a GPU whose blocks may use so much shared memory.

    Of one major version sm_80 has 163 KiB and sm_89 99 KiB, for which the tiles of sm_80 are small
    enough. From Blackwell on, those with less than sm_100's 227 KiB get sm_120's.
    """
    before_blackwell = {8: "sm_80", 9: "sm_90"}
    of_blackwell = "sm_100" if shared_bytes >= 227 << 10 else "sm_120"
    return before_blackwell.get(major, of_blackwell)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n, at a tenth of the price of Triton's."""
    return 1 << max(0, n - 1).bit_length()


@functools.lru_cache
def device_arch(device: torch.device) -> tuple[str, int]:
    """Return ``(arch, programs of a persistent grid)``."""
    if triton.knobs.runtime.interpret:
        return INTERPRETED, 4
    gpu = torch.cuda.get_device_properties(device)
    shared_bytes: int = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined,unused-ignore]
    return arch_of(gpu.major, shared_bytes), gpu.multi_processor_count
