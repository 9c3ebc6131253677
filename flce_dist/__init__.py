"""Fused linear cross entropy for tensor- and sequence-parallel training of language models."""

from flce_dist.api import LossWithMetrics, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.best import BestIds, SampledIds, linear_sample, linear_top_k
from flce_dist.data_parallel import data_parallel_linear_cross_entropy
from flce_dist.module import LinearCrossEntropy
from flce_dist.parallel.vocab import vocab_range
from flce_dist.schedules.choose import plan
from flce_dist.scores import TokenScores, linear_logprob

__all__ = [
    "BestIds",
    "LinearCrossEntropy",
    "LossWithMetrics",
    "SampledIds",
    "TokenScores",
    "data_parallel_linear_cross_entropy",
    "linear_cross_entropy",
    "linear_cross_entropy_with_metrics",
    "linear_logprob",
    "linear_sample",
    "linear_top_k",
    "plan",
    "vocab_range",
]
__version__ = "0.2.0"
