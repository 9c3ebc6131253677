"""What the kernels of best ids take and return, and their two modules as one type.

T = tokens, V = vocabulary rows here, P = ranks, k = ids of a token.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from flce_dist.kernels.logits.operands import ShardLogits

MOST_K = 2048  # of which a kernel holds twice as many numbers in registers


class Noise(NamedTuple):
    """Gumbel noise of each logit, a function of these two and of the global id alone."""

    seed: int  # within [0, 2^63)
    counters: Tensor  # [T] int64: which draw each token gets


class ShardBest(NamedTuple):
    """What one pass leaves of this shard's logits."""

    largest: Tensor  # [T] in stats_dtype; -inf where all are banned, and without rows
    sums: Tensor  # [rows, T]: of exponentials; eager [1, T], relative to ``largest``
    above: Tensor | None  # [T] int64: ids that come before the label
    pairs: Tensor | None  # [T, n] int64: the best logits and their ids, as kernels pack them


class BestKernels(Protocol):
    """The pass over this shard's logits, and what merges tokens' statistics and ids over ranks."""

    def label_logits(self, logits: ShardLogits, *, vocab_size: int) -> Tensor: ...

    def best_of_shard(
        self, logits: ShardLogits, *, k: int, label_logit: Tensor | None, noise: Noise | None
    ) -> ShardBest: ...

    def relative_to(self, largest: Tensor, of_all: Tensor, sums: Tensor) -> None: ...

    def merged_lse(self, largest: Tensor, sums: Tensor) -> Tensor: ...

    def merged_ids(
        self, pairs: Tensor, lse: Tensor, counted: Tensor, *, k: int, top_p: float | None
    ) -> tuple[Tensor, Tensor]: ...


def best_kernels_of(impl: str) -> BestKernels:
    """Import an implementation on demand: eager alone needs no working triton."""
    if impl == "triton":
        from flce_dist.kernels.best import gpu

        return gpu
    from flce_dist.kernels.best import eager

    return eager
