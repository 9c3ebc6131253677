"""Where exponentials of the leading columns are kept from statistics to gradient."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ColumnCache:
    """Windows side by side, each [T, columns] with a unit last stride, in whatever memory."""

    windows: tuple[Tensor, ...] = ()

    @property
    def width(self) -> int:
        return sum(window.shape[1] for window in self.windows)

    @property
    def dtype(self) -> torch.dtype | None:
        return self.windows[0].dtype if self.windows else None

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(first column, window)``."""
        start = 0
        for window in self.windows:
            yield start, window
            start += window.shape[1]

    def tokens(self, start: int, end: int) -> "ColumnCache":
        """The windows of tokens ``start <= t < end``."""
        return ColumnCache(tuple(window[start:end] for window in self.windows))

    def walk(self, V: int, step: int, cached_step: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """Cut V columns into pieces ``(start, end, cached)`` of at most ``step`` columns.

        cached is the piece's part of the cache, at most ``cached_step`` columns, or None where the
        cache has ended.
        """
        for first, window in self.pieces():
            for start in range(0, window.shape[1], cached_step):
                part = window[:, start : start + cached_step]
                yield first + start, first + start + part.shape[1], part
        for start in range(self.width, V, step):
            yield start, min(start + step, V), None


def new_window(T: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised [T, columns] whose rows start on 16 bytes, as TMA stores want."""
    padded = -(-columns // 16) * 16
    return torch.empty(T, padded, dtype=dtype, device=device)[:, :columns]
