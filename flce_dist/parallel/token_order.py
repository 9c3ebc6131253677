"""The order of gathered tokens under sequence parallelism: by chunk, then by rank.

P ranks hold T / P tokens each. A chunk holds the same range of each rank's tokens. The caller's
tokens are ordered by rank alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenOrder:
    """``chunks`` are token ranges (first, last), multiples of P, that are gathered in turn."""

    P: int
    chunks: tuple[tuple[int, int], ...]

    def local(self, chunk: int) -> slice:
        """Return the slice of a rank's own tokens that is in this chunk."""
        first, last = self.chunks[chunk]
        return slice(first // self.P, last // self.P)

    def part(self, chunk: int, rank: int) -> slice:
        """Return the slice of the gathered tokens that holds a rank's tokens of a chunk."""
        first, last = self.chunks[chunk]
        n = (last - first) // self.P
        return slice(first + rank * n, first + (rank + 1) * n)

    def permuted(self, x: Tensor) -> Tensor:
        """Return ``x`` [T], given in the caller's order, in the order of gathered tokens."""
        if self._is_callers:
            return x
        by_rank = x.view(self.P, -1)
        return torch.cat([by_rank[:, self.local(k)].flatten() for k in range(len(self.chunks))])

    def restored(self, x: Tensor) -> Tensor:
        """Return ``x`` [T], given in the order of gathered tokens, in the caller's order."""
        if self._is_callers:
            return x
        return torch.cat([x[start:end].view(self.P, -1) for start, end in self.chunks], 1).flatten()

    @property
    def _is_callers(self) -> bool:
        return self.P == 1 or len(self.chunks) <= 1
