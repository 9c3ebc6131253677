"""The order in which tokens are walked where sequence parallelism has split them over ranks.

P ranks hold T / P tokens each. They are gathered in pieces, so that work on the first begins while
the others are on their way: piece k is the same range of tokens of every rank. So the walk takes
piece after piece, and within a piece rank after rank; callers have rank after rank alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenOrder:
    """``pieces`` holds the bounds of each piece in the order of the walk, multiples of P."""

    P: int
    pieces: tuple[tuple[int, int], ...]

    def local(self, piece: int) -> slice:
        """Return which of a rank's own tokens are in this piece."""
        start, end = self.pieces[piece]
        return slice(start // self.P, end // self.P)

    def part(self, piece: int, rank: int) -> slice:
        """Return where a rank's tokens of a piece are among the gathered ones."""
        start, end = self.pieces[piece]
        n = (end - start) // self.P
        return slice(start + rank * n, start + (rank + 1) * n)

    def between(self, first: int, last: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the number and the bounds of each piece of tokens ``first <= t < last``."""
        for k, (start, end) in enumerate(self.pieces):
            if first <= start and end <= last:
                yield k, (start, end)

    def permuted(self, x: Tensor) -> Tensor:
        """Bring ``x`` [T], a number for each token in a caller's order, into that of the walk."""
        if self._is_callers:
            return x
        by_rank = x.view(self.P, -1)
        return torch.cat([by_rank[:, self.local(k)].flatten() for k in range(len(self.pieces))])

    def restored(self, x: Tensor) -> Tensor:
        """Bring ``x`` [T] from the order of the walk into a caller's."""
        if self._is_callers:
            return x
        return torch.cat([x[start:end].view(self.P, -1) for start, end in self.pieces], 1).flatten()

    @property
    def _is_callers(self) -> bool:
        return self.P == 1 or len(self.pieces) <= 1
