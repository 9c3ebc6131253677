"""What every launch around a logits tile has in common."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flce_dist.kernels import tuning
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.tuning import TileConfig


@dataclass(frozen=True)
class TileLaunch:
    """Grid, operands and constexprs of a persistent kernel over the tiles of ``logits``."""

    logits: ShardLogits
    config: TileConfig
    programs: int
    tma: bool

    @property
    def num_v(self) -> int:
        return triton.cdiv(self.logits.V, self.config.BLOCK_V)

    @property
    def grid(self) -> tuple[int]:
        tiles = self.num_v * triton.cdiv(self.logits.T, self.config.BLOCK_T)
        return (min(self.programs, tiles),)

    def operands(self) -> tuple[Any, Any, Tensor | None]:
        """``(hidden, weight, bias)``: descriptors, or tensors where strides forbid them."""
        logits, config = self.logits, self.config
        return (
            self.matrix(logits.hidden, config.BLOCK_T, config.BLOCK_H),
            self.matrix(logits.weight, config.BLOCK_V, config.BLOCK_H),
            logits.bias,
        )

    def matrix(self, x: Tensor, block_row: int, block_col: int) -> Any:
        if not self.tma:
            return x
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [block_row, block_col])

    def strides(self) -> tuple[int, ...]:
        return (*self.logits.hidden.stride(), *self.logits.weight.stride())

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


def tile_launch(logits: ShardLogits, *outputs: Tensor | None) -> TileLaunch:
    """Pick tile and path for ``logits``; ``outputs`` are matrices that are stored by tiles too."""
    arch, programs = tuning.device_arch(logits.hidden.device)
    config = tuning.tile_config(arch, logits.hidden.element_size(), logits.T)
    matrices = (logits.hidden, logits.weight, *outputs)
    tma = tuning.has_tma(arch) and all(x is None or _fits_descriptor(x) for x in matrices)
    return TileLaunch(logits, config, programs, tma)


def _fits_descriptor(x: Tensor) -> bool:
    """Whether TMA can address ``x``: unit last stride, rows and base on 16 bytes."""
    row_bytes = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and row_bytes % 16 == 0 and row_bytes > 0 and x.data_ptr() % 16 == 0


def stats_buffer(logits: ShardLogits, rows: int, num_v: int) -> Tensor:
    """Return an uninitialised [rows, num_v, T] fp32: one row of statistics per tile column."""
    return torch.empty(rows, num_v, logits.T, dtype=torch.float32, device=logits.hidden.device)
