"""What passes over both models' logits yield, of all sections.  T = tokens of the group."""

import torch
from torch import Tensor

from flce_dist.core.call import Call
from flce_dist.core.sections import Section, joined
from flce_dist.divergence.pair import Pair
from flce_dist.kernels.divergence.formulas import PairMetrics, PairStats


class Taken:
    """What the passes over sections have yielded, in their order."""

    def __init__(self, call: Call, sections: list[Section]):
        self.call = call
        self.sections = sections
        self._pairs: list[tuple[list[PairStats], list[PairMetrics]]] = []

    def add(self, pair: Pair) -> None:
        """Add the statistics and metrics of a section's chunks."""
        self._pairs.append((pair.stats, pair.metrics))

    def values(self) -> Tensor:
        """Return the values [T] of all tokens, in their order."""
        return self._in_order([[x.value for x in stats] for stats, _ in self._pairs])

    def metrics(self) -> list[Tensor]:
        """Return the metrics [T] of all tokens, in their order, if there are any."""
        if not self.call.options.with_metrics:
            return []
        return [
            self._in_order([[chunk[i] for chunk in metrics] for _, metrics in self._pairs])
            for i in range(len(PairMetrics._fields))
        ]

    def all_stats(self) -> PairStats:
        """Return the statistics [T] of all tokens, one section after the other."""
        of_chunks = [x for stats, _ in self._pairs for x in stats]
        return PairStats(*map(torch.cat, zip(*of_chunks, strict=True)))

    def _in_order(self, of_sections: list[list[Tensor]]) -> Tensor:
        whole = [x[0] if len(x) == 1 else torch.cat(x) for x in of_sections]
        return joined(whole, self.sections[0].parts)
