"""What every launch around a logits tile has in common."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flce_dist.kernels import exact_sums, tuning
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.tuning import TileConfig

MAX_PART_BYTES = 17 << 20
"""Of partial statistics; 264 tiles of 8192 tokens, a maximum and a sum, are 16.5 MiB."""

MAX_GROUP_PART_BYTES = 40 << 20
"""The same with sums of small groups; 132 tiles of a maximum and 8 sums are 37.1 MiB."""


@dataclass(frozen=True)
class TileLaunch:
    """Grid, operands and constexprs of a persistent kernel over the tiles of ``logits``."""

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
        """``(hidden, weight, bias)``: descriptors, or tensors where strides forbid them."""
        logits, config = self.logits, self.config
        return (
            self.matrix(logits.hidden, config.BLOCK_T, config.BLOCK_H),
            self.matrix(logits.weight, config.BLOCK_V, config.BLOCK_H),
            logits.bias,
        )

    def output(self, x: Tensor) -> Any:
        """A [T, V] matrix that the kernel stores by tiles."""
        return self.matrix(x, self.config.BLOCK_T, self.config.BLOCK_V)

    def matrix(self, x: Tensor, block_row: int, block_col: int) -> Any:
        if not self.tma:
            return x
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [block_row, block_col])

    def strides(self) -> tuple[int, ...]:
        return (*self.logits.hidden.stride(), *self.logits.weight.stride())

    def scalars(self) -> tuple[int, float, float]:
        """``(ignore_index, logit_scale, softcap)``."""
        logits = self.logits
        return logits.ignore_index, logits.logit_scale, logits.softcap or 1.0

    @property
    def group_v(self) -> int:
        """Columns that are added in fp32."""
        return self.logits.group_v or self.config.BLOCK_V

    def headrooms(self) -> dict[str, int]:
        """Of exact sums over groups of these columns."""
        return {
            "HEADROOM": exact_sums.headroom(self.group_v),
            "ENTROPY_HEADROOM": exact_sums.entropy_headroom(self.group_v),
        }

    def constexprs(self) -> dict[str, Any]:
        config, logits = self.config, self.logits
        return {
            "HAS_BIAS": logits.bias is not None,
            "HAS_SOFTCAP": logits.softcap is not None,
            "TMA": self.tma,
            "BLOCK_T": config.BLOCK_T,
            "BLOCK_V": config.BLOCK_V,
            "BLOCK_H": config.BLOCK_H,
            "GROUP_T": config.GROUP_T,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }


def tile_launch(
    logits: ShardLogits, output: Tensor | None = None, *, pointers: bool = False
) -> TileLaunch:
    """Pick tile and path for ``logits``; ``output`` [T, V] is stored by tiles too.

    Matrices travel by descriptors where strides allow it, unless ``pointers`` are asked for.
    """
    arch, programs = tuning.device_arch(logits.hidden.device)
    stores = output is not None
    config = tuning.tile_config(arch, logits.hidden.element_size(), logits.T, stores)
    matrices = (logits.hidden, logits.weight, output)
    fits = all(x is None or _fits_descriptor(x) for x in matrices)
    return TileLaunch(logits, config, programs, tuning.has_tma(arch) and fits and not pointers)


def _fits_descriptor(x: Tensor) -> bool:
    """Whether TMA can address ``x``: unit last stride, rows and base on 16 bytes."""
    row_bytes = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and row_bytes % 16 == 0 and row_bytes > 0 and x.data_ptr() % 16 == 0


class Segment(NamedTuple):
    """Columns that one launch walks; ``num_v`` tiles, the last segment may have fewer."""

    columns: int
    num_v: int
    part_rows: int  # of partial statistics, per tile


def segment_columns(logits: ShardLogits, sums: int) -> Segment:
    """Cut the columns so that partial statistics, fp32 per token, stay small.

    They are the maximum of each tile, and ``sums`` for each group of its columns. A segment is
    whole waves of the persistent grid where that is possible: its last wave is then as full as the
    others, and cutting costs one launch, below 1 % of the time of 64 waves.
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
