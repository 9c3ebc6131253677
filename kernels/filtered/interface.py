"""What ``gpu.py`` and ``eager.py`` of filtered gradients share.  T = tokens, V = rows here."""

from typing import Protocol

from torch import Tensor

from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss_formulas import TokenStats


class FilterKernels(Protocol):
    def new_tile_stats(self, logits: ShardLogits) -> Tensor: ...

    def kept_tiles(
        self, logits: ShardLogits, tiles: Tensor, stats: TokenStats, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def tile_profile(
        self, logits: ShardLogits, lse: Tensor, kept: Tensor, sample: Tensor
    ) -> Tensor: ...


def filter_kernels_of(impl: str) -> FilterKernels:
    """Import an implementation on demand: eager alone needs no working triton."""
    if impl == "triton":
        from flce_dist.kernels.filtered import gpu

        return gpu
    from flce_dist.kernels.filtered import eager

    return eager
