"""What kernels on tiles of logits take, and where D is kept.  T = tokens, V = rows, H = hidden."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Scalars(NamedTuple):
    """What kernels of tiles take beside matrices, as ``ShardLogits`` has it."""

    ignore_index: int
    logit_scale: float
    softcap: float | None
    inverse_temperature: Tensor | None
    n_counted: Tensor | None


class ShardLogits(NamedTuple):
    """``z = softcap(logit_scale * hidden @ weight.T + bias) / temperature``, never materialised.

    hidden, weight and bias share a dtype. The matrices may have any strides. Ignored rows may hold
    anything, also NaN, and contribute nothing. Tokens from ``n_counted`` on, a scalar int32 on the
    device, are all ignored: whole tiles of them are not computed, and what these would write is
    left as it is.
    """

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V], contiguous
    labels: Tensor  # [T] int64 global ids, contiguous
    vocab_start_index: int  # of V rows that this shard owns
    ignore_index: int
    logit_scale: float
    softcap: float | None
    group_v: int | None = None  # columns added in fp32 (``exact_sums``); None lets kernels choose
    inverse_temperature: Tensor | None = None  # [T] in stats_dtype, 1 where ignored
    n_counted: Tensor | None = None

    @property
    def T(self) -> int:
        return self.hidden.shape[0]

    @property
    def V(self) -> int:
        return self.weight.shape[0]

    @property
    def H(self) -> int:
        return self.hidden.shape[1]

    @property
    def strides(self) -> tuple[int, ...]:
        """Of hidden by t and h, then of weight by v and h."""
        return (*self.hidden.stride(), *self.weight.stride())

    @property
    def scalars(self) -> Scalars:
        return Scalars(
            self.ignore_index,
            self.logit_scale,
            self.softcap,
            self.inverse_temperature,
            self.n_counted,
        )

    @property
    def stats_dtype(self) -> torch.dtype:
        """Dtype of every per-token statistic: fp32, or fp64 for fp64 inputs."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def counted(self) -> Tensor:
        return self.labels != self.ignore_index

    def tokens(self, start: int, end: int) -> "ShardLogits":
        if start == 0 and end == self.T:
            return self
        n = None if self.n_counted is None else self.n_counted - start
        return self.rows(slice(start, end))._replace(n_counted=n)

    def rows(self, tokens: slice | Tensor) -> "ShardLogits":
        """The logits of these tokens, given as a slice (views) or by index."""
        inverse = self.inverse_temperature
        return self._replace(
            hidden=self.hidden[tokens],
            labels=self.labels[tokens],
            inverse_temperature=None if inverse is None else inverse[tokens],
            n_counted=None,
        )

    def columns(self, start: int, end: int) -> "ShardLogits":
        if start == 0 and end == self.V:
            return self
        return self._replace(
            weight=self.weight[start:end],
            bias=None if self.bias is None else self.bias[start:end],
            vocab_start_index=self.vocab_start_index + start,
        )


def part_of(x: Tensor, start: int, end: int) -> Tensor:
    """Return ``x[..., start:end]``; x itself, which costs the host no view, if that is all."""
    return x if start == 0 and end == x.shape[-1] else x[..., start:end]


def rows_of(x: Tensor, start: int, end: int) -> Tensor:
    """Return ``x[start:end]``; likewise x itself."""
    return x if start == 0 and end == x.shape[0] else x[start:end]


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
