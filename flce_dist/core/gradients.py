"""Two GEMMs of each window of D.  T = tokens, V = rows here, H = hidden size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands
from flce_dist.core.dlogits import Chunk, dlogits, product_of, split_columns
from flce_dist.core.hidden_gradient import ChunkOfHidden, HiddenGradient
from flce_dist.core.interface import Accumulator, Backward, Results
from flce_dist.core.sections import Section
from flce_dist.kernels import gemm
from flce_dist.kernels.logits.operands import part_of, rows_of
from flce_dist.kernels.rows import formulas
from flce_dist.kernels.rows.formulas import RowGradient, TokenStats
from flce_dist.parallel.counted import at_places


def new_dweight(weight: Tensor, dtype: torch.dtype) -> Accumulator:
    """Return a dweight [V, H] without values, contiguous whatever ``weight`` is."""
    out = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    return Accumulator(out, adds=False)


def row_gradient(
    request: Backward,
    stats: TokenStats,
    norm: Tensor | None,
    *,
    entropy: Tensor | None = None,
    from_lse: bool,
) -> RowGradient:
    """Return the factors of dlogits; a gradient of the entropy needs ``entropy`` [T]."""
    call = request.call
    operands = request.operands
    upstream = request.upstream
    assert operands is not None
    dloss, *dmetrics = (
        g if g is None or g.dim() == 0 else at_places(g, operands.places) for g in upstream
    )
    if dloss is None:
        dloss = torch.zeros_like(stats.others)
    terms = call.loss_terms
    inverse = operands.inverse_temperature
    of_loss = (operands.labels, operands.token_weight, norm, dloss, terms)
    if call.is_expressible(upstream):
        return call.kernels.row_gradient(
            stats, *of_loss, from_lse=from_lse, inverse_temperature=inverse
        )
    token_dloss = formulas.token_dloss(stats.others, *of_loss)
    return formulas.row_gradient_with_metrics(
        stats,
        token_dloss,
        dmetrics,
        entropy,
        terms,
        inverse,
        balances=from_lse,
        smooths_in_d=call.smoothing_needs_logits,
    )


class Gradients:
    """Sums the gradients that the call needs over chunks of tokens and windows of columns.

    dweight, the accumulator's, is of all columns of weight or its last ones, and sums several
    chunks only in the accumulation dtype. Rows beyond V become 0, or stay if it ``accumulates``.
    dbias is in the dtype of statistics. So is dhidden in fp16 if it ``precedes`` the upstream
    gradient, a loss scale: it may be below fp16's range. ``sections`` are those of the call.
    """

    def __init__(
        self,
        call: Call,
        operands: Operands,
        accumulator: Accumulator | None,
        *,
        precedes: bool = False,
        sections: Sequence[Section] = (),
    ):
        self.call = call
        self.weight = operands.weight
        self.dhidden: HiddenGradient | None = None
        if call.needs.hidden:
            keeps_fp32 = precedes and call.is_fp16
            is_cut = len(sections) > 1
            self.dhidden = HiddenGradient(call, operands, keeps_fp32=keeps_fp32, is_cut=is_cut)
        self.dweight: Tensor | None
        self.dweight, self.accumulates = accumulator or (None, False)
        if self.dweight is not None and not self.accumulates and call.V < len(self.weight):
            self.dweight[call.V :].zero_()
        self.dbias: Tensor | None = None
        if call.needs.bias:
            self.dbias = self.weight.new_zeros(len(self.weight), dtype=call.stats_dtype)

    def add(self, chunk: Chunk, section: Section | None = None) -> None:
        """Add all columns of a chunk; the sum of dhidden over ranks overlaps the last dweight.

        The first chunk of a ``section`` ends the sum of the last one's dhidden, and begins its own.
        """
        call = self.call
        adds = self.accumulates or chunk.tokens[0] > 0
        if section is not None and section.is_cut:
            call = section.call
            adds = adds or section.is_later
            if self.dhidden is not None and chunk.tokens[0] == 0:
                self.dhidden.begin(section)
        windows = split_columns(call, chunk)
        ready = [w for w in windows if w.cached is not None and not chunk.rescales(call)]
        made_now = windows[len(ready) :]  # computed again, or rescaled
        # D from forward lacks the tokens' scales; D that is computed now can contain them.
        contains_scale = not ready and not call.is_fp16
        rows = chunk.rows.folded() if contains_scale else chunk.rows

        reads_hidden_again = windows[-1].cached is None or chunk.again is not None
        dhidden = self.dhidden_of(chunk, rows)
        parameters = _ChunkOfParameters(
            self,
            call,
            chunk,
            rows,
            adds=adds,
            scratch=None if dhidden is None else dhidden.scratch,
            in_place=contains_scale or not reads_hidden_again,
        )
        if dhidden is not None:  # while hidden is being gathered
            for start, end, d in dlogits(call, chunk, rows, ready):
                dhidden.add(start, end, d)
        for start, end, d in dlogits(call, chunk, rows, ready):
            parameters.add(start, end, d)
        for start, end, d in dlogits(call, chunk, rows, made_now):
            if dhidden is not None:
                dhidden.add(start, end, d)
            parameters.add(start, end, d)
        if dhidden is not None:
            dhidden.dweight_done()

    def dhidden_of(self, chunk: Chunk, rows: RowGradient) -> ChunkOfHidden | None:
        """Begin dhidden of a chunk, if it is needed; ``rows`` say which scales its D lacks."""
        return None if self.dhidden is None else ChunkOfHidden(self.dhidden, chunk, rows)

    def finished(self, *, rounds_dbias: bool = True) -> Results:
        """Return the results; dhidden is summed over ranks, of this rank's tokens."""
        dhidden = None if self.dhidden is None else self.dhidden.finished()
        dbias = self.dbias
        if dbias is not None and rounds_dbias:
            dbias = dbias.to(self.call.dtype)
        return dhidden, self.dweight, dbias


class _ChunkOfParameters:
    """dweight and dbias of a chunk, as far as the call needs them.

    dweight ``adds`` to what is there. Hidden times the tokens' scales overwrites gathered hidden if
    ``in_place``, else ``scratch`` or a new buffer.
    """

    def __init__(
        self,
        gradients: Gradients,
        call: Call,
        chunk: Chunk,
        rows: RowGradient,
        *,
        adds: bool,
        scratch: Tensor | None,
        in_place: bool,
    ):
        self._gradients = gradients
        self._call = call
        self._chunk = chunk
        self._rows = rows
        self._adds = adds
        self._scratch = scratch
        self._in_place = in_place
        self._product = product_of(call, chunk)
        self._factor: tuple[Tensor, Tensor | None] | None = None  # once hidden has arrived

    def add(self, start: int, end: int, d: Tensor) -> None:
        """Add what follows from ``d`` [T, end - start], D of these columns."""
        dweight = self._gradients.dweight
        dbias = self._gradients.dbias
        if dweight is not None:
            hidden, row = self._scaled_hidden(dweight.shape[1])
            out = rows_of(dweight, start, end)
            self._product(d, hidden, sums_tokens=True, row=row, out=out, adds=self._adds)
        if dbias is not None:
            dbias[start:end] += dbias_of(self._call, self._chunk, d, self._rows)

    def _scaled_hidden(self, columns: int) -> tuple[Tensor, Tensor | None]:
        if self._factor is None:
            self._factor = dweight_factor(
                self._call,
                self._chunk,
                self._rows,
                columns=columns,
                in_place=self._in_place,
                scratch=self._scratch,
            )
        return self._factor


def dweight_factor(
    call: Call,
    chunk: Chunk,
    rows: RowGradient,
    *,
    columns: int,
    in_place: bool,
    scratch: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return hidden times the tokens' scales [T, n], and what smoothing adds to dweight's rows [n].

    n are the last ``columns`` of H. It overwrites gathered hidden if ``in_place``, else ``scratch``
    or a new buffer; the caller's hidden is never written.
    """
    assert chunk.logits is not None and chunk.gather is not None
    chunk.gather.wait()
    kernels = call.kernels
    ignore_index = call.options.ignore_index
    H = chunk.logits.H
    hidden = part_of(chunk.logits.hidden, H - columns, H)
    labels = chunk.labels
    if scratch is not None:
        scratch = part_of(scratch, H - columns, H)
    out = hidden if in_place and chunk.gather.owns_tokens else scratch
    if out is None:
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if rows.scale is None or rows.uniform is not None:
        # Clears ignored rows, which may hold NaN, before a sum or the GEMM reads them.
        kernels.scale_rows(hidden, None, labels, ignore_index=ignore_index, out=out)
    row = None if rows.uniform is None else gemm.weighted_row_sum(rows.uniform, out)
    if rows.scale is not None:
        kernels.scale_rows(hidden, rows.scale, labels, ignore_index=ignore_index, out=out)
    return out, row


def dbias_of(call: Call, chunk: Chunk, d: Tensor, rows: RowGradient) -> Tensor:
    """Return [W]: the bias gradient of the columns of ``d`` [T, W]."""
    scale = rows.scale
    if scale is None:
        scale = d.new_ones(len(d), dtype=call.stats_dtype)
    counted = None if chunk.n_counted is None else product_of(call, chunk)
    dbias = gemm.weighted_row_sum(scale, d, counted)
    if rows.uniform is not None:
        dbias = dbias + rows.uniform.sum()
    return dbias / call.options.logit_scale
