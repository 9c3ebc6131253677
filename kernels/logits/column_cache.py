"""Exponentials of leading columns, kept for the gradients.  T = tokens, V = rows here."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.kernels.logits.shard_logits import part_of


class Window(NamedTuple):
    """Columns ``start <= v < end`` of a shard, and their cached D [T, end - start], if any."""

    start: int
    end: int
    cached: Tensor | None


@dataclass(frozen=True)
class ColumnCache:
    """The first ``width`` columns of D, as windows [T, columns] with a unit last stride."""

    windows: tuple[Tensor, ...] = ()

    @property
    def width(self) -> int:
        return sum(window.shape[1] for window in self.windows)

    def with_starts(self) -> Iterator[tuple[int, Tensor]]:
        start = 0
        for window in self.windows:
            yield start, window
            start += window.shape[1]

    def tokens(self, start: int, end: int) -> "ColumnCache":
        if not self.windows or (start == 0 and end == len(self.windows[0])):
            return self
        return ColumnCache(tuple(window[start:end] for window in self.windows))

    def split(self, V: int, step: int, cached_step: int) -> list[Window]:
        """Cut V columns: cached windows of at most ``cached_step``, then others of ``step``."""
        ranges = []
        for first, window in self.with_starts():
            for start in range(0, window.shape[1], cached_step):
                end = min(start + cached_step, window.shape[1])
                ranges.append(Window(first + start, first + end, part_of(window, start, end)))
        return ranges + [Window(a, min(a + step, V), None) for a in range(self.width, V, step)]


def new_window(T: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised [T, columns]; rows start at multiples of 16 bytes, as TMA requires."""
    padded = -(-columns // 16) * 16
    return part_of(torch.empty(T, padded, dtype=dtype, device=device), 0, columns)
