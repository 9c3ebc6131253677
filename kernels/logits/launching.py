"""How kernels that compute tiles of logits are launched: tile, grid, operands, segments.

T = tokens, V = vocabulary rows here.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flce_dist.kernels import tuning
from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.tuning import TileConfig, next_power_of_2

MAX_PART_BYTES = 17 << 20
"""Limit of partial statistics: a maximum and a sum of 264 tiles of 8192 tokens are 16.5 MiB."""

MAX_GROUP_PART_BYTES = 40 << 20
"""The same with sums of small groups: a maximum and 8 sums of 132 such tiles are 37.1 MiB."""


@dataclass(frozen=True)
class TileLaunch:
    """Grid and constexprs of a persistent kernel over the tiles of logits [T, V]."""

    config: TileConfig
    programs: int  # of the largest grid
    tma: bool  # whether matrices are passed as tensor descriptors
    T: int
    V: int
    group_v: int  # neighbouring columns that are added in fp32

    @property
    def num_v(self) -> int:
        return -(-self.V // self.config.BLOCK_V)

    @property
    def grid(self) -> tuple[int]:
        tiles = self.num_v * -(-self.T // self.config.BLOCK_T)
        return (min(self.programs, tiles),)

    def operands(self, logits: ShardLogits) -> tuple[Any, Any, Tensor | None]:
        """``(hidden, weight, bias)``."""
        config = self.config
        return (
            matrix(logits.hidden, (config.BLOCK_T, config.BLOCK_H), self.tma),
            matrix(logits.weight, (config.BLOCK_V, config.BLOCK_H), self.tma),
            logits.bias,
        )

    def output(self, x: Tensor) -> Any:
        """x [T, V], which the kernel stores tile by tile."""
        return matrix(x, (self.config.BLOCK_T, self.config.BLOCK_V), self.tma)

    @property
    def constexprs(self) -> dict[str, Any]:
        """Constexprs of a kernel that computes tiles of logits, and launch options."""
        return {"TMA": self.tma, **vars(self.config)}


def tile_launch(
    logits: ShardLogits, output: Tensor | None = None, *, pointers: bool = False
) -> TileLaunch:
    """Choose the tile for ``logits``, and whether matrices are passed as descriptors.

    They are where the GPU has TMA and the strides allow it, unless ``pointers`` is set. The kernel
    also stores ``output`` [T, V], if there is one, tile by tile.
    """
    hidden = logits.hidden
    T = logits.T
    V = logits.V
    arch, programs = tuning.device_arch(hidden.device)
    config = tuning.tile_config(arch, hidden.element_size(), T, stores=output is not None)
    tma = not pointers and has_tma(arch, hidden, logits.weight, output)
    return TileLaunch(config, programs, tma, T, V, logits.group_v or config.BLOCK_V)


def has_tma(arch: str, *matrices: Tensor | None) -> bool:
    """Whether the architecture has TMA, which loads and stores tiles, and can address these.

    That takes a unit last stride, and rows and base aligned to 16 bytes.
    """
    return arch != "sm_80" and all(
        x.stride(1) == 1
        and x.stride(0) > 0
        and x.stride(0) * x.element_size() % 16 == x.data_ptr() % 16 == 0
        for x in matrices
        if x is not None
    )


def matrix(x: Tensor, block: tuple[int, int], tma: bool) -> Any:
    """x as a kernel takes it, tile by tile of shape ``block``."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block)) if tma else x


def tokens_of_merge(T: int) -> int:
    """Choose how many tokens a program merges, a power of 2.

    It reads 32 to 128 contiguous bytes of each row of partial statistics.
    """
    return min(next_power_of_2(T), 32, max(8, next_power_of_2(T) // 256))


class Segment(NamedTuple):
    """What one launch of the statistics kernel computes; the last segment may be shorter."""

    columns: int
    num_v: int  # tiles of columns
    part_rows: int  # rows [T] of partial statistics for each tile of columns


def segment_columns(logits: ShardLogits, sums: int) -> Segment:
    """Choose the segments of columns such that partial statistics stay within their limit.

    They are fp32 per token: the maximum of each tile, and ``sums`` sums of each group of its
    columns. Where possible a segment is whole waves of the persistent grid. Its last wave is then
    as full as the others, and a cut costs one launch, below 1 % of the time of 64 waves.
    """
    launch = tile_launch(logits, pointers=True)
    T = launch.T
    BLOCK_T = launch.config.BLOCK_T
    BLOCK_V = launch.config.BLOCK_V
    part_rows = 1 + sums * (BLOCK_V // launch.group_v)
    most = MAX_PART_BYTES if logits.group_v is None else MAX_GROUP_PART_BYTES
    num_v = launch.num_v
    limit = max(1, most // (4 * part_rows * T))
    if num_v > limit:
        whole_waves = launch.programs // math.gcd(launch.programs, -(-T // BLOCK_T))
        num_v = limit // whole_waves * whole_waves or limit
    return Segment(num_v * BLOCK_V, num_v, part_rows)
