"""How kernels that compute tiles of logits are launched: tile, grid, operands, segments.

Used by ``linear_stats``, ``rescue`` and ``dlogits``. T = tokens, V = vocabulary rows here.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flce_dist.kernels import exact_sums, tuning
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.tuning import TileConfig

MAX_PART_BYTES = 17 << 20
"""Limit of partial statistics: a maximum and a sum of 264 tiles of 8192 tokens are 16.5 MiB."""

MAX_GROUP_PART_BYTES = 40 << 20
"""The same with sums of small groups: a maximum and 8 sums of 132 such tiles are 37.1 MiB."""


@dataclass(frozen=True)
class TileLaunch:
    """Grid, operands and constexprs of a persistent kernel over the tiles of ``logits``.

    ``programs`` is the largest grid, ``tma`` whether matrices are passed as tensor descriptors.
    """

    logits: ShardLogits
    config: TileConfig
    programs: int
    tma: bool

    @property
    def num_v(self) -> int:
        return -(-self.logits.V // self.config.BLOCK_V)

    @property
    def grid(self) -> tuple[int]:
        tiles = self.num_v * -(-self.logits.T // self.config.BLOCK_T)
        return (min(self.programs, tiles),)

    def operands(self) -> tuple[Any, Any, Tensor | None]:
        """``(hidden, weight, bias)``."""
        logits, config = self.logits, self.config
        return (
            matrix(logits.hidden, (config.BLOCK_T, config.BLOCK_H), self.tma),
            matrix(logits.weight, (config.BLOCK_V, config.BLOCK_H), self.tma),
            logits.bias,
        )

    def output(self, x: Tensor) -> Any:
        """x [T, V], which the kernel stores tile by tile."""
        return matrix(x, (self.config.BLOCK_T, self.config.BLOCK_V), self.tma)

    def strides(self) -> tuple[int, ...]:
        return (*self.logits.hidden.stride(), *self.logits.weight.stride())

    def scalars(self) -> tuple[int, float, float]:
        """``(ignore_index, logit_scale, softcap)``."""
        logits = self.logits
        return logits.ignore_index, logits.logit_scale, logits.softcap or 1.0

    @property
    def group_v(self) -> int:
        """Number of neighbouring columns that are added in fp32."""
        return self.logits.group_v or self.config.BLOCK_V

    def headrooms(self) -> dict[str, int]:
        """Constexprs of the exact sums of such groups."""
        return {
            "HEADROOM": exact_sums.headroom(self.group_v),
            "ENTROPY_HEADROOM": exact_sums.entropy_headroom(self.group_v),
        }

    def constexprs(self) -> dict[str, Any]:
        """Constexprs of ``logits_tile`` in a grid over all tiles, and launch options."""
        return {
            "HAS_BIAS": self.logits.bias is not None,
            "HAS_SOFTCAP": self.logits.softcap is not None,
            "TMA": self.tma,
            **vars(self.config),
        }

    def listed_constexprs(self) -> dict[str, Any]:
        """The same in a grid over listed tiles, of logits without softcap."""
        others = ("HAS_SOFTCAP", "GROUP_T")
        return {name: x for name, x in self.constexprs().items() if name not in others}


def tile_launch(
    logits: ShardLogits, output: Tensor | None = None, *, pointers: bool = False
) -> TileLaunch:
    """Choose the tile for ``logits``, and whether matrices are passed as descriptors.

    They are where the GPU has TMA and the strides allow it, unless ``pointers`` is set. The kernel
    also stores ``output`` [T, V], if there is one, tile by tile.
    """
    arch, programs = tuning.device_arch(logits.hidden.device)
    stores = output is not None
    config = tuning.tile_config(arch, logits.hidden.element_size(), logits.T, stores)
    matrices = (logits.hidden, logits.weight, output)
    fits = all(x is None or fits_descriptor(x) for x in matrices)
    return TileLaunch(logits, config, programs, tuning.has_tma(arch) and fits and not pointers)


def fits_descriptor(x: Tensor) -> bool:
    """Whether TMA can address x: a unit last stride, rows and base aligned to 16 bytes."""
    row_bytes = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and row_bytes % 16 == 0 and row_bytes > 0 and x.data_ptr() % 16 == 0


def matrix(x: Tensor, block: tuple[int, int], tma: bool) -> Any:
    """x as a kernel takes it, tile by tile of shape ``block``."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block)) if tma else x


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
    arch, programs = tuning.device_arch(logits.hidden.device)
    config = tuning.tile_config(arch, logits.hidden.element_size(), logits.T, stores=False)
    part_rows = 1 + sums * (config.BLOCK_V // (logits.group_v or config.BLOCK_V))
    num_v = -(-logits.V // config.BLOCK_V)
    most = MAX_PART_BYTES if logits.group_v is None else MAX_GROUP_PART_BYTES
    limit = max(1, most // (4 * part_rows * logits.T))
    if num_v > limit:
        whole_waves = programs // math.gcd(programs, -(-logits.T // config.BLOCK_T))
        num_v = limit // whole_waves * whole_waves or limit
    return Segment(num_v * config.BLOCK_V, num_v, part_rows)
