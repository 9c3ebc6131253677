"""What both kinds of filtered gradients need of tiles, as a type: ``gpu.py`` and ``eager.py`` here.

The docstrings are those of the Triton functions. How gradients follow differs: ``gpu.py`` has the
kernels that read the kept tiles alone, ``eager.py`` the D that contains the others, too.
T = tokens, V = vocabulary rows here.
"""

from typing import Protocol

from torch import Tensor

from flce_dist.kernels.logits.operands import ShardLogits
from flce_dist.kernels.rows.formulas import TokenStats


class TileKernels(Protocol):
    """Which tiles are kept, and the profile of the others."""

    def new_tile_stats(self, logits: ShardLogits) -> Tensor: ...

    def kept_tiles(
        self, logits: ShardLogits, tile_stats: Tensor, stats: TokenStats, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def profile_sample(self, labels: Tensor, scale: Tensor, *, ignore_index: int) -> Tensor: ...

    def tile_profile(
        self, logits: ShardLogits, lse: Tensor, kept: Tensor, sample: Tensor
    ) -> Tensor: ...


def tile_kernels_of(impl: str) -> TileKernels:
    """Import an implementation on demand: eager alone needs no working triton."""
    if impl == "triton":
        from flce_dist.kernels.filtered import gpu

        return gpu
    from flce_dist.kernels.filtered import eager

    return eager
