"""A call of each public function with ``(hidden, weight, labels)`` and keywords, by its name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from flce_dist import (
    data_parallel_linear_cross_entropy,
    linear_cross_entropy,
    linear_cross_entropy_with_metrics,
    linear_divergence,
    linear_logprob,
    linear_sample,
    linear_top_k,
)

CALLS: dict[str, Callable[..., Any]] = {
    "linear_cross_entropy": linear_cross_entropy,
    "linear_cross_entropy_with_metrics": linear_cross_entropy_with_metrics,
    "data_parallel_linear_cross_entropy": partial(
        data_parallel_linear_cross_entropy, data_group=None
    ),
    "linear_logprob": lambda hidden, weight, labels, **keywords: linear_logprob(
        hidden, weight, labels[..., None], **keywords
    ),
    "linear_divergence": lambda hidden, weight, labels, **keywords: linear_divergence(
        hidden, weight, hidden.detach(), weight.detach(), **keywords
    ),
    "linear_top_k": lambda hidden, weight, labels, **keywords: linear_top_k(
        hidden, weight, 2, labels=labels, **keywords
    ),
    "linear_sample": lambda hidden, weight, labels, **keywords: linear_sample(
        hidden, weight, 1, **keywords
    ),
}
