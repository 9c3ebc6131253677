"""The kernels of filtered gradients as types: what ``gpu.py`` and ``eager.py`` offer.

T = tokens, V = vocabulary rows here, H = hidden size.
"""

from typing import Any, Protocol

from torch import Tensor

from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import RowGradient
from flce_dist.kernels.token_loss_formulas import TokenStats


class FilterKernels(Protocol):
    """Lists of kept tiles are what ``tile_lists`` of the same implementation returns."""

    def new_tile_stats(self, logits: ShardLogits) -> Tensor: ...

    def kept_tiles(
        self, logits: ShardLogits, tiles: Tensor, stats: TokenStats, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def tile_profile(
        self, logits: ShardLogits, lse: Tensor, kept: Tensor, sample: Tensor
    ) -> Tensor: ...

    def rank_one(
        self, logits: ShardLogits, total: Tensor, mass: Tensor, scale: Tensor | None, *,
        with_means: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]: ...  # fmt: skip

    def tile_lists(self, kept: Tensor, capacity: int) -> Any: ...

    def new_kept_buffer(self, logits: ShardLogits, capacity: int) -> Tensor: ...

    def kept_dlogits(
        self, logits: ShardLogits, rows: RowGradient, scale: Tensor | None,
        lists: Any, round: int, *, out: Tensor,
    ) -> Tensor: ...  # fmt: skip

    def add_kept_dhidden(
        self, d: Tensor, weight: Tensor, lists: Any, round: int, acc: Tensor
    ) -> None: ...

    def kept_dweight(
        self, d: Tensor, hidden: Tensor, lists: Any, round: int, q: Tensor, hbar: Tensor,
        row: Tensor | None, *, out: Tensor, accumulates: bool,
    ) -> None: ...  # fmt: skip

    def add_kept_dbias(
        self, d: Tensor, scale: Tensor | None, lists: Any, round: int, out: Tensor
    ) -> None: ...


def filter_kernels_of(impl: str) -> FilterKernels:
    """Import an implementation on demand: eager alone needs no working triton."""
    if impl == "triton":
        from flce_dist.kernels.filtered import gpu

        return gpu
    from flce_dist.kernels.filtered import eager

    return eager
