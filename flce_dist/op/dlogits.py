"""The matrix D of ``row_gradient``, of which both gradients are products.

T = tokens, V = real vocabulary rows here, H = hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flce_dist.kernels.column_cache import ColumnCache, new_window
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import RowGradient
from flce_dist.kernels.token_loss_formulas import TokenStats
from flce_dist.op.call import Call
from flce_dist.parallel.collectives import TokenGather


def from_lse(dtype: torch.dtype) -> bool:
    """Whether D of operands of ``dtype`` is relative to lse: fp16 must not pass 65,504."""
    return dtype == torch.float16


@dataclass
class LateLogits:
    """Logits of tokens whose hidden states may still be on their way, in these pieces."""

    logits: ShardLogits
    gather: TokenGather
    pieces: tuple[tuple[int, int], ...] = ()

    def parts(self) -> Iterator[tuple[slice, ShardLogits]]:
        """Yield tokens as they arrive, each piece waited for; all of them at once if they have."""
        if not self.pieces:
            yield slice(None), self.logits
        pieces, self.pieces = self.pieces, ()
        for piece, (start, end) in enumerate(pieces):
            self.gather.wait(piece)
            yield slice(start, end), self.logits.tokens(start, end)

    def whole(self) -> ShardLogits:
        """Wait for all tokens."""
        for _ in self.parts():
            pass
        return self.logits


Piece = tuple[int, int, Tensor | None]
"""Columns ``start <= v < end`` of this shard, and their part of the cache."""


@dataclass
class Dlogits:
    """The matrix D of ``row_gradient``, one piece of columns at a time, in the operands' dtype.

    D of the pieces ``kept``, the leading ones, is what the cache holds, from before the tokens'
    scales were known. D of the pieces ``made`` is recomputed, or converted from the cache, and
    belongs to ``made_rows``.
    """

    call: Call
    labels: Tensor
    stats: TokenStats
    rows: RowGradient
    cache: ColumnCache
    dtype: torch.dtype
    logits: LateLogits | None  # for what is not in the cache, and for hidden
    scaled_hidden: TokenGather | None = None  # instead, where nothing else is made of hidden
    _window: Tensor | None = None

    def __post_init__(self) -> None:
        V, step = self.call.shard.V, max(1, self.call.plan.window_v)
        keeps = not self.call.rewrites(self.dtype)
        whole = self.cache.dtype == self.dtype
        pieces: list[Piece] = list(self.cache.walk(V, step, max(1, V) if whole else step))
        self.kept = [piece for piece in pieces if keeps and piece[2] is not None]
        self.made = pieces[len(self.kept) :]
        if not pieces:  # every shard has one
            self.made = [(0, 0, None)]
        self.recomputes = bool(self.made) and self.made[-1][2] is None
        self.made_rows = self.rows.folded() if self.folds else self.rows

    @property
    def folds(self) -> bool:
        """Whether D made here has the tokens' scales inside, so that no scaled hidden is needed.

        Beside kept columns that is worth it only if hidden can be scaled in place after the others,
        which kept columns that lie in dweight's own memory cannot wait for.
        """
        if not self.made or from_lse(self.dtype):
            return False
        return not self.kept or (self._owns_hidden and self.call.plan.lending is None)

    @property
    def frees_hidden(self) -> bool:
        """Whether hidden may be overwritten by dweight's right factor: no logits need it scaled."""
        return self._owns_hidden and (self.folds or not self.recomputes)

    @property
    def _owns_hidden(self) -> bool:
        return self.logits is not None and self.logits.gather.owns_tokens

    def piece(self, start: int, end: int, cached: Tensor | None) -> Tensor:
        """Return D of these columns, [T, end - start]; what is made is valid until the next call.

        Hidden states are waited for only if the columns must be recomputed.
        """
        if start == end:  # a shard without rows
            return self._reused_window(0)
        if cached is None:
            assert self.logits is not None
            out, rows = self._reused_window(end - start), self.made_rows
            for t, part in self.logits.parts():
                self.call.kernels.dlogits(
                    part.columns(start, end),
                    rows.reference[t],
                    rows.label_value[t],
                    tuple(x[t] for x in rows.affine),
                    out=out[t],
                )
            return out
        if not self.call.rewrites(self.dtype):
            return cached
        return self._converted(cached, self.call.shard.start + start)

    def _converted(self, cached: Tensor, vocab_start_index: int) -> Tensor:
        """Bring scales into bf16 exponentials, or these into fp16 by changing their reference."""
        out, rows = self._reused_window(cached.shape[1]), self.made_rows
        if self.folds:
            (change,) = rows.affine
        else:
            change = (self.stats.reference - rows.reference).exp()
        ignore_index = self.call.options.ignore_index
        kernels = self.call.kernels
        kernels.scale_rows(cached, change, self.labels, ignore_index=ignore_index, out=out)
        kernels.write_label_value(
            out,
            self.labels,
            rows.label_value,
            vocab_start_index=vocab_start_index,
            ignore_index=ignore_index,
        )
        return out

    def _reused_window(self, columns: int) -> Tensor:
        if self._window is None or self._window.shape[1] < columns:
            self._window = new_window(len(self.labels), columns, self.dtype, self.labels.device)
        return self._window[:, :columns]
