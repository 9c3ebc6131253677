"""The kernels of scores as types: what ``gpu.py`` and ``eager.py`` offer.

T = tokens, V = vocabulary rows here, H = hidden size, N = ids of all tokens.
"""

from typing import Protocol

from torch import Tensor

from flce_dist.kernels.scores.token_ids import Rest, TokenIds
from flce_dist.kernels.shard_logits import ShardLogits


class ScoreKernels(Protocol):
    """Passes over N rows of [H], and over [N]."""

    def logits_at_ids(self, logits: ShardLogits, ids: TokenIds) -> Tensor: ...

    def set_scores(
        self, z: Tensor, ids: TokenIds, rest: Rest | None, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...

    def write_named(
        self, out: Tensor, ids: TokenIds, value: Tensor, *, vocab_start_index: int
    ) -> None: ...

    def dhidden_of_ids(
        self, factor: Tensor, ids: TokenIds, weight: Tensor, *, vocab_start_index: int, out: Tensor
    ) -> None: ...

    def dweight_of_ids(
        self, factor: Tensor, ids: TokenIds, hidden: Tensor, order: Tensor, *,
        vocab_start_index: int, out: Tensor, adds: bool,
    ) -> None: ...  # fmt: skip


def score_kernels_of(impl: str) -> ScoreKernels:
    """Import an implementation on demand: eager alone needs no working triton."""
    if impl == "triton":
        from flce_dist.kernels.scores import gpu

        return gpu
    from flce_dist.kernels.scores import eager

    return eager
