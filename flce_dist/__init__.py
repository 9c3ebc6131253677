"""Fused linear cross-entropy for tensor- and sequence-parallel training of language models."""

import importlib
from typing import TYPE_CHECKING, Any

from flce_dist.api import LossWithMetrics, linear_cross_entropy, linear_cross_entropy_with_metrics
from flce_dist.best import BestIds, SampledIds, linear_sample, linear_top_k
from flce_dist.data_parallel import data_parallel_linear_cross_entropy
from flce_dist.divergence import (
    DivergenceWithMetrics,
    linear_divergence,
    linear_divergence_with_metrics,
)
from flce_dist.module import LinearCrossEntropy
from flce_dist.parallel.vocab import vocab_range
from flce_dist.planning import CallPlan, plan
from flce_dist.scores import TokenScores, linear_logprob

if TYPE_CHECKING:
    from flce_dist import compat as compat
    from flce_dist import filtered as filtered
    from flce_dist import hf as hf
    from flce_dist import megatron as megatron
    from flce_dist import memory as memory
    from flce_dist import parallel_style as parallel_style
    from flce_dist import reference as reference
    from flce_dist import testing as testing

__all__ = [
    "BestIds",
    "CallPlan",
    "DivergenceWithMetrics",
    "LinearCrossEntropy",
    "LossWithMetrics",
    "SampledIds",
    "TokenScores",
    "data_parallel_linear_cross_entropy",
    "linear_cross_entropy",
    "linear_cross_entropy_with_metrics",
    "linear_divergence",
    "linear_divergence_with_metrics",
    "linear_logprob",
    "linear_sample",
    "linear_top_k",
    "plan",
    "vocab_range",
]
__version__ = "0.3.0"

_MODULES = (
    "compat",
    "filtered",
    "hf",
    "megatron",
    "memory",
    "parallel_style",
    "reference",
    "testing",
)
"""Modules that are imported when their names are first used."""

if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"flce_dist.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]
