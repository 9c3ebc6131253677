"""The operand of all kernels that compute logits: what a rank's logits are made of.

T = tokens, V = vocabulary rows here, H = hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ShardLogits(NamedTuple):
    """``z = softcap(logit_scale * hidden @ weight.T + bias) / temperature``, never materialised.

    hidden [T, H], weight [V, H] and bias [V] share a dtype. The matrices may have any strides; bias
    and labels are contiguous. labels are [T] int64 global ids; this shard owns those with
    ``vocab_start_index <= label < vocab_start_index + V``. Rows with ``label == ignore_index`` may
    hold anything, also NaN, and contribute nothing. ``group_v`` is how many neighbouring columns
    are added in fp32 (see ``exact_sums``); None lets each kernel choose. ``inverse_temperature`` is
    [T] in the dtype of statistics, 1 where ignored; None is 1. Statistics leave out the label
    and ``named`` ids: [N] int64, and [T] each from where to where a token has them, ascending.
    Tokens from ``n_counted`` on, a scalar int32 on the device, are all ignored: whole tiles of them
    are not computed, and what these would write is left as it is.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    vocab_start_index: int
    ignore_index: int
    logit_scale: float
    softcap: float | None
    group_v: int | None = None
    inverse_temperature: Tensor | None = None
    named: tuple[Tensor, Tensor, Tensor] | None = None
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
        """``(ignore_index, logit_scale, softcap)``, inverse temperatures and n_counted."""
        inverse = self.inverse_temperature
        return self.ignore_index, self.logit_scale, self.softcap, inverse, self.n_counted

    @property
    def stats_dtype(self) -> torch.dtype:
        """Dtype of every per-token statistic: fp32, or fp64 for fp64 inputs."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def counted(self) -> Tensor:
        """[T] bool: which tokens are not ignored."""
        return self.labels != self.ignore_index

    def tokens(self, start: int, end: int) -> "ShardLogits":
        """The logits of tokens ``start <= t < end`` (views)."""
        if start == 0 and end == self.T:
            return self
        n = None if self.n_counted is None else self.n_counted - start
        return self.rows(slice(start, end))._replace(n_counted=n)

    def rows(self, tokens: slice | Tensor) -> "ShardLogits":
        """The logits of these tokens, given as a slice (views) or by index."""
        inverse, named = self.inverse_temperature, self.named
        return self._replace(
            hidden=self.hidden[tokens],
            labels=self.labels[tokens],
            inverse_temperature=None if inverse is None else inverse[tokens],
            named=None if named is None else (named[0], named[1][tokens], named[2][tokens]),
            n_counted=None,
        )

    def columns(self, start: int, end: int) -> "ShardLogits":
        """The logits of this shard's rows ``start <= v < end`` (views)."""
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
