"""Fused linear cross entropy for tensor- and sequence-parallel training of language models."""

from flce_dist.api import (
    LossWithMetrics,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
)
from flce_dist.module import LinearCrossEntropy

__all__ = [
    "LinearCrossEntropy",
    "LossWithMetrics",
    "linear_cross_entropy",
    "linear_cross_entropy_with_metrics",
]
__version__ = "0.1.0"
