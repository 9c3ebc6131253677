"""The kernels of a divergence as types: what ``gpu.py`` and ``eager.py`` here both offer.

The docstrings are those of the Triton functions. T = tokens, V = vocabulary rows here.
"""

from typing import Protocol

import torch
from torch import Tensor

from flce_dist.kernels.divergence.formulas import Measure, PairStats
from flce_dist.kernels.logits.operands import ShardLogits


class PairKernels(Protocol):
    """The passes over the logits [T, V] of a student and a teacher."""

    def pair_logits(
        self, logits: ShardLogits, *,
        out: Tensor | None, rows: Tensor, first: Tensor | None = None,
        first_max: Tensor | None = None,
    ) -> None: ...  # fmt: skip

    def stats_of_totals(
        self, of_ranks: Tensor, measure: Measure, dtype: torch.dtype
    ) -> PairStats: ...

    def pair_sums(
        self, s: Tensor, t: Tensor, logits: ShardLogits, stats: PairStats, measure: Measure, *,
        with_metrics: bool, is_invariant: bool,
    ) -> Tensor: ...  # fmt: skip

    def pair_dlogits(
        self, s: Tensor, t: Tensor, logits: ShardLogits, stats: PairStats, measure: Measure,
        scale: Tensor, *, out: Tensor,
    ) -> None: ...  # fmt: skip


def pair_kernels_of(impl: str) -> PairKernels:
    """Import an implementation on demand: eager alone needs no working triton."""
    if impl == "triton":
        from flce_dist.kernels.divergence import gpu

        return gpu
    from flce_dist.kernels.divergence import eager

    return eager
