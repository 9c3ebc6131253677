"""The operand of all kernels that compute logits.  T = tokens, V = rows here, H = hidden size."""

from typing import NamedTuple

import torch
from torch import Tensor


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
    def scalars(self) -> tuple[int, float, float | None, Tensor | None, Tensor | None]:
        inverse = self.inverse_temperature
        return self.ignore_index, self.logit_scale, self.softcap, inverse, self.n_counted

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
