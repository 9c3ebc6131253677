"""Filtered gradients, experimental: approximate gradients of the exact loss, in less time.

    from flce_dist import filtered, linear_cross_entropy

    loss = linear_cross_entropy(hidden, weight, labels, schedule=filtered.schedule(2**-12))

``frequency_order`` puts the rows of the weight into the order that this needs, and
``filtered_gradients`` is the fp64 definition of what is computed. docs/filtered_gradients.md says
when to use it and when not to.
"""

from flce_dist.filtered.gradients import FilteredLossWithMetrics, schedule
from flce_dist.filtered.oracle import FilteredGradients, filtered_gradients
from flce_dist.filtered.vocab_order import VocabOrder, frequency_order

__all__ = [
    "FilteredGradients",
    "FilteredLossWithMetrics",
    "VocabOrder",
    "filtered_gradients",
    "frequency_order",
    "schedule",
]
