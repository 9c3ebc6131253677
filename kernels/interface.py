"""The kernel interface as types: what ``gpu.py`` and ``eager.py`` both offer.

``kernels_of`` returns one of the two modules as a ``Kernels``, so that a type checker sees through
it. The docstrings are those of the Triton functions. T = tokens, V = vocabulary rows here.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from flce_dist.kernels.ids.token_ids import IdEntries, TokenIds
from flce_dist.kernels.logits.operands import ColumnCache, ShardLogits
from flce_dist.kernels.logits.target import Target
from flce_dist.kernels.rows.formulas import LabelWindow, LossTerms, RowGradient, TokenStats


class Kernels(Protocol):
    """What schedules are made of: passes over logits and over tokens; those of ids come last."""

    def logits_at_ids(
        self, logits: ShardLogits, ids: Tensor, token: Tensor | None, *, vocab_size: int
    ) -> Tensor: ...

    def new_sums(self, logits: ShardLogits, target: Target) -> Tensor: ...

    def linear_stats(
        self, logits: ShardLogits, label_logit: Tensor, target: Target, *,
        cache: ColumnCache, others_max: Tensor, sums: Tensor,
    ) -> None: ...  # fmt: skip

    def rescue(
        self, logits: ShardLogits, label_logit: Tensor, others_max: Tensor, sums: Tensor,
        target: Target, *, cache: ColumnCache,
    ) -> None: ...  # fmt: skip

    def token_loss(
        self, labels: Tensor, token_weight: Tensor | None, label_logit: Tensor,
        others_max: Tensor, sums: Tensor, terms: LossTerms, *, with_entropy: bool,
        inverse_temperature: Tensor | None = None, windows: Sequence[LabelWindow] = (),
    ) -> tuple[TokenStats, Tensor]: ...  # fmt: skip

    def loss_norm(
        self, labels: Tensor, token_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
    ) -> Tensor: ...

    def reduce_loss(self, loss: Tensor, norm: Tensor | None) -> Tensor: ...

    def mean_loss(
        self, loss: Tensor, labels: Tensor, token_weight: Tensor | None, ignore_index: int
    ) -> tuple[Tensor, Tensor]: ...

    def row_gradient(
        self, stats: TokenStats, labels: Tensor, token_weight: Tensor | None,
        norm: Tensor | None, dloss: Tensor | None, terms: LossTerms, *, from_lse: bool,
        inverse_temperature: Tensor | None = None,
    ) -> RowGradient: ...  # fmt: skip

    def dlogits(
        self, logits: ShardLogits, reference: Tensor, label_value: Tensor,
        affine: tuple[Tensor, ...], *, out: Tensor,
    ) -> None: ...  # fmt: skip

    def counted_gemm(
        self, d: Tensor, b: Tensor, count: Tensor, *,
        sums_tokens: bool, row: Tensor | None = None, out: Tensor, adds: bool,
    ) -> None: ...  # fmt: skip

    def write_at_ids(
        self, out: Tensor, ids: Tensor, token: Tensor | None, value: Tensor,
        vocab_start_index: int, ignore_index: int,
    ) -> None: ...  # fmt: skip

    def scale(self, x: Tensor, factor: Tensor, *, out: Tensor) -> None: ...

    def scale_rows(
        self, x: Tensor, scale: Tensor | None, labels: Tensor, *,
        ignore_index: int, plus: tuple[Tensor, Tensor] | None = None, out: Tensor,
    ) -> None: ...  # fmt: skip

    def sorted_ids(self, ids: Tensor, offsets: Tensor, vocab_size: int) -> TokenIds: ...

    def set_scores(
        self, z: Tensor, ids: TokenIds, unnamed: TokenStats | None, *,
        vocab_size: int, with_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...  # fmt: skip

    def set_gradient(
        self, z: Tensor, ids: TokenIds, logprob: Tensor, entropy: Tensor | None,
        upstream: tuple[Tensor | None, Tensor | None, Tensor | None],
        inverse_temperature: Tensor | None, *, softcap: float | None, logit_scale: float,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def dhidden_of_ids(
        self, factor: Tensor, ids: TokenIds, weight: Tensor, *, vocab_start_index: int, out: Tensor
    ) -> None: ...

    def dweight_of_ids(
        self, entries: IdEntries, hidden: Tensor, *, vocab_start_index: int, out: Tensor, adds: bool
    ) -> None: ...


def kernels_of(impl: str) -> Kernels:
    """Import an implementation on demand: eager alone needs no working triton.

    ``best_kernels_of``, ``pair_kernels_of`` and ``tile_kernels_of`` of the folders' interfaces do
    the same for theirs.
    """
    if impl == "triton":
        from flce_dist.kernels import gpu

        return gpu
    from flce_dist.kernels import eager

    return eager
