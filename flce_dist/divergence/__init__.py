"""Divergence of a student from a teacher, of whose logits neither is materialised."""

from flce_dist.divergence.api import (
    DivergenceWithMetrics,
    linear_divergence,
    linear_divergence_with_metrics,
)
from flce_dist.divergence.shard import teacher_shard

__all__ = [
    "DivergenceWithMetrics",
    "linear_divergence",
    "linear_divergence_with_metrics",
    "teacher_shard",
]
