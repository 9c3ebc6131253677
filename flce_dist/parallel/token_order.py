"""The order of gathered tokens under sequence parallelism: by piece, then by rank.

P ranks hold T / P tokens each. A piece holds the same range of each rank's tokens. The caller's
tokens are ordered by rank alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenOrder:
    """``pieces`` holds the bounds of each piece among the gathered tokens, multiples of P."""

    P: int
    pieces: tuple[tuple[int, int], ...]

    def local(self, piece: int) -> slice:
        """Return the slice of a rank's own tokens that is in this piece."""
        start, end = self.pieces[piece]
        return slice(start // self.P, end // self.P)

    def part(self, piece: int, rank: int) -> slice:
        """Return the slice of the gathered tokens that holds a rank's tokens of a piece."""
        start, end = self.pieces[piece]
        n = (end - start) // self.P
        return slice(start + rank * n, start + (rank + 1) * n)

    def between(self, first: int, last: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the number and the bounds of each piece within ``first <= t < last``."""
        for k, (start, end) in enumerate(self.pieces):
            if first <= start and end <= last:
                yield k, (start, end)

    def permuted(self, x: Tensor) -> Tensor:
        """Return ``x`` [T], given in the caller's order, in the order of gathered tokens."""
        if self._is_callers:
            return x
        by_rank = x.view(self.P, -1)
        return torch.cat([by_rank[:, self.local(k)].flatten() for k in range(len(self.pieces))])

    def restored(self, x: Tensor) -> Tensor:
        """Return ``x`` [T], given in the order of gathered tokens, in the caller's order."""
        if self._is_callers:
            return x
        return torch.cat([x[start:end].view(self.P, -1) for start, end in self.pieces], 1).flatten()

    def gathered(self, T: int, device: torch.device) -> Tensor | None:
        """Return the places of the caller's tokens among the gathered, [T] int64; None if equal."""
        return None if self._is_callers else self.restored(torch.arange(T, device=device))

    @property
    def _is_callers(self) -> bool:
        return self.P == 1 or len(self.pieces) <= 1
