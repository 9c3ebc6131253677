"""From the matrix D of a call to its gradients: the steps that backward and in_forward share.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flce_dist.call import Call
from flce_dist.kernels import gemm
from flce_dist.kernels.column_cache import ColumnCache, new_window
from flce_dist.kernels.merge import TokenStats
from flce_dist.kernels.row_gradient import RowGradient
from flce_dist.kernels.shard_logits import ShardLogits


def in_forward_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which in_forward saves gradients: the sum over tokens may leave fp16's range."""
    return torch.float32 if dtype == torch.float16 else dtype


def from_lse(dtype: torch.dtype) -> bool:
    """Whether D of operands of ``dtype`` is relative to lse: fp16 must not pass 65,504."""
    return dtype == torch.float16


@dataclass
class Dlogits:
    """The matrix D of ``row_gradient``, one piece of columns at a time, in the operands' dtype."""

    call: Call
    labels: Tensor
    stats: TokenStats
    rows: RowGradient
    cache: ColumnCache
    dtype: torch.dtype
    _window: Tensor | None = None

    def pieces(self) -> list[tuple[int, int, Tensor | None]]:
        """Columns ``(start, end, cached)`` in ascending order, at least one piece."""
        V, step = self.call.shard.V, max(1, self.call.plan.window_v)
        cached_step = max(1, V) if self.cache.dtype == self.dtype else step
        return list(self.cache.walk(V, step, cached_step)) or [(0, 0, None)]

    def piece(
        self, start: int, end: int, cached: Tensor | None, logits: Callable[[], ShardLogits]
    ) -> Tensor:
        """Return D of these columns, [T, end - start]; valid until the next call.

        ``logits`` is called only if the columns must be recomputed.
        """
        if start == end:  # a shard without rows
            return self._reused_window(0)
        if cached is None:
            out = self._reused_window(end - start)
            self.call.kernels.dlogits(
                logits().columns(start, end),
                self.rows.reference,
                self.rows.label_value,
                self.rows.affine,
                out=out,
            )
            return out
        if cached.dtype == self.dtype:
            return cached
        return self._converted(cached, self.call.shard.start + start)

    def _converted(self, cached: Tensor, vocab_start_index: int) -> Tensor:
        """Bring bf16 exponentials into fp16 by changing their reference."""
        out = self._reused_window(cached.shape[1])
        change = (self.stats.reference - self.rows.reference).exp()
        ignore_index = self.call.options.ignore_index
        kernels = self.call.kernels
        kernels.scale_rows(cached, change, self.labels, ignore_index=ignore_index, out=out)
        kernels.write_label_value(
            out,
            self.labels,
            self.rows.label_value,
            vocab_start_index=vocab_start_index,
            ignore_index=ignore_index,
        )
        return out

    def _reused_window(self, columns: int) -> Tensor:
        if self._window is None or self._window.shape[1] < columns:
            self._window = new_window(len(self.labels), columns, self.dtype, self.labels.device)
        return self._window[:, :columns]


@dataclass
class Gradients:
    """Sums dhidden [T, H], dweight [V, H] and dbias [V] over pieces of D, those that are wanted.

    ``dweight`` has rows beyond the vocabulary's, which become 0; in the dtype in which products
    accumulate it sums several chunks of tokens, else there must be one.
    """

    call: Call
    dtype: torch.dtype  # of hidden
    share: Tensor | None  # of dhidden, this shard's
    dweight: Tensor | None
    dbias: Tensor | None

    def __post_init__(self) -> None:
        self._dhidden = None if self.share is None else self.call.sum_dhidden(self.share)
        if self.dweight is not None:
            self.dweight[self.call.shard.V :] = 0.0

    def add(
        self,
        tokens: tuple[int, int],
        logits: Callable[[], ShardLogits],
        weight: Tensor,
        dlogits: Dlogits,
    ) -> None:
        """Take all columns of ``tokens``, once for each token.

        ``logits`` of them is called where their hidden states are needed, not before. The sum of
        dhidden over ranks starts before the last dweight.
        """
        call, dweight = self.call, self.dweight
        labels, rows = dlogits.labels, dlogits.rows
        share = None if self.share is None else self.share[slice(*tokens)]
        acc = None if share is None else rows.reference.new_empty(share.shape)
        # Until dhidden is written, at the end, its memory is free.
        lent = None if call.reduces_dhidden else share

        @functools.cache
        def scaled() -> tuple[Tensor, Tensor | None]:
            out = weight.new_empty(len(labels), weight.shape[1]) if lent is None else lent
            return scaled_hidden(call, logits(), rows, out)

        def finish_dhidden() -> None:
            if self._dhidden is not None and acc is not None and share is not None:
                write_dhidden(call, acc, weight, labels, rows, share)
                self._dhidden.start(*tokens)

        pieces = dlogits.pieces()
        for start, end, cached in pieces:
            d = dlogits.piece(start, end, cached, logits)
            if acc is not None:
                gemm.add_matmul(acc, d, weight[start:end], first=start == 0)
            if call.reduces_dhidden and (start, end) == pieces[-1][:2]:
                finish_dhidden()
            if dweight is not None:
                self._add_dweight(d, *scaled(), out=dweight[start:end], first=tokens[0] == 0)
            if self.dbias is not None:
                self.dbias[start:end] += dbias_piece(call, d, rows)
        if not call.reduces_dhidden:
            finish_dhidden()

    def _add_dweight(
        self, d: Tensor, hidden: Tensor, row: Tensor | None, *, out: Tensor, first: bool
    ) -> None:
        one_chunk = out.dtype == self.dtype and len(self.call.plan.chunks()) == 1
        if one_chunk:
            gemm.weight_grad(d, hidden, row=row, out=out)
            return
        gemm.add_matmul(out, d.T, hidden, first=first)
        if row is not None:
            out += row

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dhidden of this rank's tokens, summed over ranks, dweight and dbias."""
        dhidden = None if self._dhidden is None else self._dhidden.wait().to(self.dtype)
        return dhidden, self.dweight, self.dbias


def scaled_hidden(
    call: Call, logits: ShardLogits, rows: RowGradient, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return hidden times each token's scale, [T, H], the right factor of dweight, in ``out``.

    The second result, [H], is what label smoothing adds to every row of dweight.
    """
    kernels, ignore_index = call.kernels, call.options.ignore_index
    row = None
    if rows.uniform is not None:
        ones = torch.ones_like(rows.uniform)
        kernels.scale_rows(logits.hidden, ones, logits.labels, ignore_index=ignore_index, out=out)
        row = gemm.weighted_row_sum(rows.uniform, out)
    kernels.scale_rows(logits.hidden, rows.scale, logits.labels, ignore_index=ignore_index, out=out)
    return out, row


def write_dhidden(
    call: Call, acc: Tensor, weight: Tensor, labels: Tensor, rows: RowGradient, out: Tensor
) -> None:
    """Write this shard's share of dhidden, [T, H], from ``acc = D @ weight``."""
    plus = None
    if rows.uniform is not None:
        ones = rows.uniform.new_ones(call.shard.V)
        plus = rows.uniform, gemm.weighted_row_sum(ones, weight[: call.shard.V])
    ignore_index = call.options.ignore_index
    call.kernels.scale_rows(acc, rows.scale, labels, ignore_index=ignore_index, plus=plus, out=out)


def dbias_piece(call: Call, d: Tensor, rows: RowGradient) -> Tensor:
    """Return [W]: the bias gradient of the columns of ``d`` [T, W]."""
    scale = torch.ones_like(rows.reference) if rows.scale is None else rows.scale
    dbias = gemm.weighted_row_sum(scale, d)
    if rows.uniform is not None:
        dbias = dbias + rows.uniform.sum()
    return dbias / call.options.logit_scale
