"""Backward: the matrix D of ``dlogits = scale * D + uniform``, and the GEMMs of both gradients.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size.
D [T, V] exists one window of columns at a time, from forward's cache or computed again.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.kernels import gemm, token_gradient_formulas
from flce_dist.kernels.column_cache import ColumnCache, new_window
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_gradient_formulas import MetricGradients, RowGradient
from flce_dist.kernels.token_loss_formulas import TokenStats
from flce_dist.op.forward import Saved, loss_terms, shard_logits
from flce_dist.op.main_grad import MainGrad
from flce_dist.op.prepare import Call, Operands
from flce_dist.parallel import transport
from flce_dist.parallel.collectives import TokenGather, TokenSum

Results = tuple[Tensor | None, Tensor | None, Tensor | None]
"""dhidden [T, H] (under sequence parallelism [T / P, H]), dweight [V, H] and dbias [V]."""


def backward(
    call: Call,
    operands: Operands,
    saved: Saved,
    upstream: Sequence[Tensor | None],
    needs: Sequence[bool],
    main_grad: MainGrad | None = None,
) -> Results:
    """Return the gradients that are needed: schedules recompute and cached.

    ``upstream`` are the gradients of the loss, lse, logprob and entropy, in the caller's order.
    With ``main_grad`` dweight is added there, and the dweight that is returned says so.
    """
    hidden, weight, bias, labels, _ = operands
    rows, expressible = row_gradient(call, operands, saved, upstream)
    cache = saved.cache if expressible else None

    # Decided by facts that all ranks share, not by which upstream gradients this rank got.
    gather = logits = None
    some_recompute = call.plan.cached_v < call.plan.V or (
        call.options.vocab_range is not None and call.plan.limit is not None  # the larger shards
    )
    if needs[1] or call.options.with_metrics or some_recompute:
        gather = transport.gather(hidden, call.order, call.sequence_group)
        gather.start_all()
        logits = shard_logits(call, gather.tokens, weight, bias, labels)

    gradients = new_gradients(call, operands, needs, main_grad)
    windows = ColumnCache(() if cache is None else (cache,))
    chunk = Chunk((0, len(labels)), labels, saved.stats, rows, windows, gather, logits)
    gradients.add(chunk)
    if gather is not None:
        gather.wait_all()  # even if nothing read it: copies must not outlive their buffer
    return gradients.finished(main_grad)


def new_gradients(
    call: Call, operands: Operands, needs: Sequence[bool], main_grad: MainGrad | None
) -> "Gradients":
    """Allocate the gradients of one chunk; dweight is ``main_grad`` if that is given."""
    weight, dhidden, dweight, dbias = operands.weight, None, None, None
    if needs[0]:
        dhidden = sum_of_dhidden(call, len(operands.labels), weight)
    accumulates = False
    if main_grad is not None:
        dweight, accumulates = main_grad.opened()
    elif needs[1]:
        dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if needs[2]:
        assert operands.bias is not None
        dbias = torch.zeros_like(operands.bias)
    return Gradients(call, weight, dhidden, dweight, dbias, accumulates)


def row_gradient(
    call: Call, operands: Operands, saved: Saved, upstream: Sequence[Tensor | None]
) -> tuple[RowGradient, bool]:
    """Return the factors of dlogits, and whether cached exponentials express it."""
    stats, terms = saved.stats, loss_terms(call)
    dloss, *dmetrics = (
        g if g is None or g.dim() == 0 else call.order.permuted(g) for g in upstream
    )
    if dloss is None:
        dloss = torch.zeros_like(stats.others)
    metrics = MetricGradients(*dmetrics)
    of_loss = (operands.labels, operands.token_weight, saved.norm, dloss, terms)
    if metrics.any() or not call.expressible:
        token_dloss = token_gradient_formulas.token_dloss(stats.others, *of_loss)
        rows = token_gradient_formulas.row_gradient_with_metrics(
            stats, token_dloss, metrics, saved.entropy, terms
        )
        return rows, False
    return call.kernels.row_gradient(stats, *of_loss, from_lse=call.is_from_lse), True


def sum_of_dhidden(call: Call, T: int, weight: Tensor) -> TokenSum:
    """Return the sum of dhidden over ranks, with the buffer [T, H] of this rank's share."""
    in_fp32 = call.options.reduce_in_fp32 and call.reduces_dhidden
    return transport.token_sum(
        (T, weight.shape[1]),
        gemm.acc_dtype(weight.dtype) if in_fp32 else weight.dtype,
        weight.device,
        call.order,
        call.tp_group if call.reduces_dhidden else None,
        sequence_parallel=call.options.sequence_parallel,
    )


class Chunk(NamedTuple):
    """Tokens ``first <= t < last`` whose statistics are known. Tensors hold these tokens only."""

    tokens: tuple[int, int]
    labels: Tensor
    stats: TokenStats
    rows: RowGradient
    cache: ColumnCache
    gather: TokenGather | None  # None where nothing needs hidden
    logits: ShardLogits | None  # hidden may still be arriving


class Window(NamedTuple):
    """Columns ``start <= v < end`` of this shard, and their cached D, if any."""

    start: int
    end: int
    cached: Tensor | None


@dataclass
class Gradients:
    """Sums the gradients over chunks of tokens and windows of columns; None if not needed.

    ``dweight`` has the rows of ``weight``. It can sum several chunks in the accumulation dtype, but
    only takes one chunk in the operands' dtype. Rows beyond V become 0. If dweight ``accumulates``,
    gradients are added to its values instead, and rows beyond V stay.
    """

    call: Call
    weight: Tensor
    dhidden: TokenSum | None
    dweight: Tensor | None
    dbias: Tensor | None
    accumulates: bool = False
    acc: Tensor | None = None  # of a chunk's dhidden, [T, H] in the accumulation dtype

    def __post_init__(self) -> None:
        if self.dweight is not None and not self.accumulates:
            self.dweight[self.call.V :] = 0.0

    def add(self, chunk: Chunk) -> None:
        """Add all columns of a chunk.

        The dhidden GEMMs of cached windows come first, while hidden is still being gathered. The
        sum of dhidden over ranks starts before the last dweight GEMM and overlaps it.
        """
        call = self.call
        windows = split_columns(call, chunk.cache)
        cached = [w for w in windows if w.cached is not None and not call.rescales_cache]
        others = windows[len(cached) :]
        # D from forward lacks the tokens' scales; D that is computed now can contain them.
        contains_scale = not cached and not call.is_from_lse
        rows = chunk.rows.folded() if contains_scale else chunk.rows

        scratch = self.new_accumulator(chunk)
        in_place = contains_scale or windows[-1].cached is not None
        factor = functools.cache(lambda: dweight_factor(call, chunk, rows, in_place, scratch))

        for start, end, d in dlogits(call, chunk, rows, cached):
            self._add_dhidden(start, end, d)
        if not others and scratch is None:
            self.finish_dhidden(chunk, rows)
        for start, end, d in dlogits(call, chunk, rows, cached):
            self._add_parameters(chunk, rows, factor, start, end, d)
        for start, end, d in dlogits(call, chunk, rows, others):
            self._add_dhidden(start, end, d)
            if end == windows[-1].end and scratch is None:
                self.finish_dhidden(chunk, rows)
            self._add_parameters(chunk, rows, factor, start, end, d)
        if scratch is not None:
            self.finish_dhidden(chunk, rows)

    def new_accumulator(self, chunk: Chunk) -> Tensor | None:
        """Allocate that of dhidden, and return a [T, H] that is scratch until it is rounded."""
        if self.dhidden is None:
            return None
        share = self.dhidden.tokens[slice(*chunk.tokens)]
        self.acc = torch.empty_like(share, dtype=gemm.acc_dtype(self.call.dtype))
        return None if self.call.reduces_dhidden else share

    def _add_dhidden(self, start: int, end: int, d: Tensor) -> None:
        if self.acc is not None:
            gemm.add_matmul(self.acc, d, self.weight[start:end], first=start == 0)

    def finish_dhidden(self, chunk: Chunk, rows: RowGradient) -> None:
        """Round the accumulator into this rank's share, and start the sum over ranks."""
        if self.dhidden is None:
            return
        plus = None
        if rows.uniform is not None:
            weight = self.weight[: self.call.V]
            plus = rows.uniform, gemm.weighted_row_sum(rows.uniform.new_ones(len(weight)), weight)
        self.dhidden.acquire()
        self.call.kernels.scale_rows(
            self.acc,
            rows.scale,
            chunk.labels,
            ignore_index=self.call.options.ignore_index,
            plus=plus,
            out=self.dhidden.tokens[slice(*chunk.tokens)],
        )
        self.acc = None  # freed before the peers' shares get buffers
        self.dhidden.start(*chunk.tokens)

    def _add_parameters(
        self,
        chunk: Chunk,
        rows: RowGradient,
        factor: Callable[[], tuple[Tensor, Tensor | None]],
        start: int,
        end: int,
        d: Tensor,
    ) -> None:
        """Add D [T, end - start] to dweight and dbias of these columns."""
        if self.dweight is not None:
            hidden, row = factor()
            out = self.dweight[start:end]
            is_only = len(self.call.plan.chunks()) == 1 and not self.accumulates
            if out.dtype == self.weight.dtype and is_only:
                gemm.matmul(d.T, hidden, row=row, out=out)
            else:
                first = chunk.tokens[0] == 0 and not self.accumulates
                gemm.add_matmul(out, d.T, hidden, first=first)
                if row is not None:
                    out += row
        if self.dbias is not None:
            self.dbias[start:end] += dbias_of(self.call, d, rows)

    def finished(self, main_grad: MainGrad | None = None) -> Results:
        """Return dhidden of this rank's tokens, summed over ranks, dweight and dbias.

        With ``main_grad``, the dweight that is returned says that it was added there.
        """
        dhidden = None if self.dhidden is None else self.dhidden.wait().to(self.call.dtype)
        return dhidden, self.dweight if main_grad is None else main_grad.closed(), self.dbias


def split_columns(call: Call, cache: ColumnCache) -> list[Window]:
    """Cut the shard's columns into windows, cached ones first; an empty shard has an empty one."""
    step = max(1, call.plan.window_v)
    # A cache in the operands' dtype is used as it is; another is converted a window at a time.
    cached_step = max(1, call.V) if cache.dtype == call.dtype else step
    windows = [Window(*columns) for columns in cache.split(call.V, step, cached_step)]
    return windows or [Window(0, 0, None)]


def dlogits(
    call: Call, chunk: Chunk, rows: RowGradient, windows: Sequence[Window]
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ``start, end`` and D [T, end - start] of each window, in the operands' dtype.

    D that is not cached lies in one buffer, which the next window overwrites. Only recomputed
    columns wait for hidden.
    """
    buffer = None
    for start, end, cached in windows:
        if cached is not None and not call.rescales_cache:
            yield start, end, cached
            continue
        if buffer is None:
            widest = max(window.end - window.start for window in windows)
            buffer = new_window(len(chunk.labels), widest, call.dtype, chunk.labels.device)
        d = buffer[:, : end - start]
        if cached is not None:
            _rescale(call, chunk, rows, cached, call.vocab_start_index + start, out=d)
        elif start < end:
            _recompute(call, chunk, rows, start, end, out=d)
        yield start, end, d


def _recompute(
    call: Call, chunk: Chunk, rows: RowGradient, start: int, end: int, out: Tensor
) -> None:
    """Compute D of columns ``start <= v < end`` from the logits, token piece by token piece."""
    assert chunk.logits is not None and chunk.gather is not None
    for t in chunk.gather.arrivals(*chunk.tokens):
        call.kernels.dlogits(
            chunk.logits.tokens(t.start, t.stop).columns(start, end),
            rows.reference[t],
            rows.label_value[t],
            tuple(x[t] for x in rows.affine),
            out=out[t],
        )


def _rescale(
    call: Call,
    chunk: Chunk,
    rows: RowGradient,
    cached: Tensor,
    vocab_start_index: int,
    out: Tensor,
) -> None:
    """Multiply bf16 exponentials by the tokens' scales; in fp16 make them relative to lse."""
    if call.is_from_lse:
        change = (chunk.stats.reference - rows.reference).exp()
    else:
        (change,) = rows.affine
    kernels, ignore_index = call.kernels, call.options.ignore_index
    kernels.scale_rows(cached, change, chunk.labels, ignore_index=ignore_index, out=out)
    kernels.write_label_value(
        out,
        chunk.labels,
        rows.label_value,
        vocab_start_index=vocab_start_index,
        ignore_index=ignore_index,
    )


def dweight_factor(
    call: Call, chunk: Chunk, rows: RowGradient, in_place: bool, scratch: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return hidden times each token's scale, [T, H], the right factor of dweight.

    It overwrites gathered hidden if ``in_place``, else ``scratch`` or a new buffer; the caller's
    hidden is never written. The second result, [H], is what label smoothing adds to every row of
    dweight.
    """
    assert chunk.logits is not None and chunk.gather is not None
    chunk.gather.wait_tokens(*chunk.tokens)
    kernels, ignore_index = call.kernels, call.options.ignore_index
    hidden, labels = chunk.logits.hidden, chunk.labels
    out = hidden if in_place and chunk.gather.owns_tokens else scratch
    if out is None:
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if rows.scale is None or rows.uniform is not None:
        kernels.scale_rows(hidden, None, labels, ignore_index=ignore_index, out=out)
    row = None if rows.uniform is None else gemm.weighted_row_sum(rows.uniform, out)
    if rows.scale is not None:
        kernels.scale_rows(hidden, rows.scale, labels, ignore_index=ignore_index, out=out)
    return out, row


def dbias_of(call: Call, d: Tensor, rows: RowGradient) -> Tensor:
    """Return [W]: the bias gradient of the columns of ``d`` [T, W]."""
    scale = torch.ones_like(rows.reference) if rows.scale is None else rows.scale
    dbias = gemm.weighted_row_sum(scale, d)
    if rows.uniform is not None:
        dbias = dbias + rows.uniform.sum()
    return dbias / call.options.logit_scale
