"""From the matrix D of a call to its gradients: the steps that backward and in_forward share.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flce_dist.call import Call
from flce_dist.collectives import TokenGather, TokenSum
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
    _window: Tensor | None = None

    def __post_init__(self) -> None:
        V, step = self.call.shard.V, max(1, self.call.plan.window_v)
        keeps = self.cache.dtype == self.dtype
        pieces: list[Piece] = list(self.cache.walk(V, step, max(1, V) if keeps else step))
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
        if not self.recomputes or from_lse(self.dtype):
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
    dhidden: TokenSum | None
    dweight: Tensor | None
    dbias: Tensor | None

    def __post_init__(self) -> None:
        if self.dweight is not None:
            self.dweight[self.call.shard.V :] = 0.0

    def add(self, tokens: tuple[int, int], weight: Tensor, dlogits: Dlogits) -> None:
        """Take all columns of ``tokens``, once for each token.

        Hidden states are waited for where they are needed, not before: kept columns make dhidden
        without. Those that may be overwritten are, after the last logits. The sum of dhidden over
        ranks starts before the last dweight.
        """
        call, labels, folds = self.call, dlogits.labels, dlogits.folds
        kept, made, rows, made_rows = dlogits.kept, dlogits.made, dlogits.rows, dlogits.made_rows
        share = None if self.dhidden is None else self.dhidden.tokens[slice(*tokens)]
        acc = None
        if self.dhidden is not None:
            acc = self.dhidden.accumulator(len(labels), rows.reference.dtype)
        # Until dhidden is written, at the end, its memory is free.
        lent = None if call.reduces_dhidden else share

        @functools.cache
        def factor(folded: bool) -> tuple[Tensor, Tensor | None]:
            assert dlogits.logits is not None
            of = dlogits.logits.whole()
            out = of.hidden if dlogits.frees_hidden else lent
            if out is None:
                out = weight.new_empty(of.hidden.shape)
            return right_factor(call, of, made_rows if folded else rows, out)

        def add_dhidden(start: int, end: int, d: Tensor) -> None:
            if acc is not None:
                gemm.add_matmul(acc, d, weight[start:end], first=start == 0)

        def finish_dhidden() -> None:
            nonlocal acc
            if self.dhidden is not None and acc is not None and share is not None:
                self.dhidden.acquire()
                blocks = self.dhidden.blocks(len(labels))
                write_dhidden(call, acc, weight, labels, made_rows, blocks, share)
                acc = None  # its memory may hold what comes from other ranks
                self.dhidden.start(*tokens)

        def add_parameters(start: int, end: int, d: Tensor, *, folded: bool) -> None:
            if self.dweight is not None:
                out, first = self.dweight[start:end], tokens[0] == 0
                self._add_dweight(d, *factor(folded), out=out, first=first)
            if self.dbias is not None:
                self.dbias[start:end] += dbias_piece(call, d, made_rows if folded else rows)

        def add_kept_parameters() -> None:
            for start, end, cached in kept:
                d = dlogits.piece(start, end, cached)
                add_parameters(start, end, d, folded=False)

        for start, end, cached in kept:
            add_dhidden(start, end, dlogits.piece(start, end, cached))
        if folds and kept and acc is not None:  # before what comes with the scales inside
            scale_rows = call.kernels.scale_rows
            scale_rows(acc, rows.scale, labels, ignore_index=call.options.ignore_index, out=acc)
        if call.reduces_dhidden and not made:
            finish_dhidden()
        if not folds:
            add_kept_parameters()
        for start, end, cached in made:
            d = dlogits.piece(start, end, cached)
            add_dhidden(start, end, d)
            if call.reduces_dhidden and (start, end) == made[-1][:2]:
                finish_dhidden()
            add_parameters(start, end, d, folded=folds)
        if folds:
            add_kept_parameters()
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
        dhidden = None if self.dhidden is None else self.dhidden.wait().to(self.dtype)
        return dhidden, self.dweight, self.dbias


def right_factor(
    call: Call, logits: ShardLogits, rows: RowGradient, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return hidden times each token's scale, [T, H], the right factor of dweight, in ``out``.

    ``out`` may be hidden itself. The second result, [H], is what label smoothing adds to every row
    of dweight.
    """
    kernels, ignore_index = call.kernels, call.options.ignore_index
    hidden, labels = logits.hidden, logits.labels
    if out is hidden:
        kernels.clear_ignored(out, labels, ignore_index=ignore_index)
    elif rows.scale is None or rows.uniform is not None:
        kernels.scale_rows(hidden, None, labels, ignore_index=ignore_index, out=out)
    row = None if rows.uniform is None else gemm.weighted_row_sum(rows.uniform, out)
    if rows.scale is not None:
        kernels.scale_rows(hidden, rows.scale, labels, ignore_index=ignore_index, out=out)
    return out, row


def write_dhidden(
    call: Call,
    acc: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: RowGradient,
    blocks: list[slice],
    out: Tensor,
) -> None:
    """Write this shard's share of dhidden, [T, H], from ``acc = D @ weight``, block by block."""
    row = None
    if rows.uniform is not None:
        ones = rows.uniform.new_ones(call.shard.V)
        row = gemm.weighted_row_sum(ones, weight[: call.shard.V])
    for t in blocks:
        call.kernels.scale_rows(
            acc[t],
            None if rows.scale is None else rows.scale[t],
            labels[t],
            ignore_index=call.options.ignore_index,
            plus=None if rows.uniform is None or row is None else (rows.uniform[t], row),
            out=out[t],
        )


def dbias_piece(call: Call, d: Tensor, rows: RowGradient) -> Tensor:
    """Return [W]: the bias gradient of the columns of ``d`` [T, W]."""
    scale = torch.ones_like(rows.reference) if rows.scale is None else rows.scale
    dbias = gemm.weighted_row_sum(scale, d)
    if rows.uniform is not None:
        dbias = dbias + rows.uniform.sum()
    return dbias / call.options.logit_scale
