"""The schedule in_forward.  T = tokens of the group, V = real rows here, H = hidden size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands
from flce_dist.core.dlogits import Chunk, Elements
from flce_dist.core.gradients import Gradients, new_dweight
from flce_dist.core.interface import Backward, Metrics, Results, Saved
from flce_dist.core.sections import (
    Section,
    in_order_of_sections,
    rows_of_sections,
    sections_of,
    with_next,
)
from flce_dist.core.statistics import Pass, early_norm, finished
from flce_dist.kernels.logits.operands import ColumnCache, ShardLogits, new_window
from flce_dist.kernels.rows.formulas import RowGradient, TokenStats
from flce_dist.parallel.vocab import INVARIANT_ROWS
from flce_dist.schedules.saved_gradients import (
    SavedGradients,
    factors_of_forward,
    labels_of_dhidden,
    saved_dtype,
    times_upstream,
)
from flce_dist.schedules.windows import Sizes

LentWindows = tuple[tuple[int, int], ...]  # (columns, row of dweight where they lie)

Factors = Callable[[TokenStats, ShardLogits, tuple[int, int]], tuple[RowGradient, Elements | None]]
"""What D of a chunk is made of, from its statistics, its logits and its range of tokens."""


class ChunkResults(NamedTuple):
    """What the pass over a chunk's logits yields, of its tokens."""

    stats: TokenStats
    loss: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class InForward(Sizes):
    """All exponentials of a chunk of tokens are held at once, and its gradients are made of them.

    Sizes are those of the first chunk; later ones hold all columns.
    Forward: three GEMMs of 2 T H V flop. Several chunks accumulate dweight in fp32. Under sequence
    parallelism chunks are sections; for each a gather of hidden, in flight while the one before is
    computed, and the sum of dhidden over ranks, in flight during the logits of the next, of the
    last one during dweight. The all-reduces of ``chunk_loss``.
    Backward: the gradients times the scalar upstream gradient, at no cost if it is 1. If hidden
    alone needs a gradient, tokens may have upstream gradients of their own: dhidden times these.
    """

    first_t: int  # tokens of the first chunk
    chunk_t: int  # and of later ones
    lending: LentWindows = ()  # columns of the first chunk that lie in dweight's own memory

    keeps_operands: ClassVar[bool] = False

    def chunks(self) -> list[tuple[int, int]]:
        """Return the token ranges (first, last) that are taken one after the other."""
        starts = [0, *range(self.first_t, self.T, self.chunk_t)]
        return list(zip(starts, [*starts[1:], self.T], strict=True))

    def rows_of_chunks(self, P: int) -> list[tuple[int, int]]:
        """Return the rows (first, last) of each of P ranks where chunks are sections."""
        return rows_of_sections(self.T, P, (self.first_t, self.chunk_t))

    def sections(self, call: Call, operands: Operands) -> list[Section]:
        """Return the chunks as sections of a call whose hidden is split, else one of all chunks."""
        return sections_of(call, operands, (self.first_t, self.chunk_t))

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Metrics, Saved]:
        norm = early_norm(call, operands)
        weights, norm_in_d, norm_in_backward = factors_of_forward(call, operands, norm)
        sections = self.sections(call, operands)
        if weights is not None:
            weights = in_order_of_sections(weights, sections)
        rounds_once = len(self.chunks()) == len(sections) == 1 and not call.is_fp16
        accumulator = None
        if call.needs.weight:
            dtype = call.dtype if rounds_once else call.stats_dtype
            accumulator = new_dweight(operands.trained, dtype)
        gradients = Gradients(call, operands, accumulator, precedes=True, sections=sections)

        def of_loss(
            stats: TokenStats, logits: ShardLogits, tokens: tuple[int, int]
        ) -> tuple[RowGradient, None]:
            rows = call.kernels.row_gradient(
                stats,
                logits.labels,
                None if weights is None else weights[slice(*tokens)],
                norm_in_d,
                None,
                call.loss_terms,
                from_lse=call.is_fp16,
                inverse_temperature=logits.inverse_temperature,
            )
            return rows.half_folded() if call.is_fp16 else rows, None

        chunks = self.add_chunks(sections, begun_pass, gradients, of_loss)
        losses = [chunk.loss for chunk in chunks]
        metrics = [chunk.metrics for chunk in chunks]
        parts = sections[0].parts
        loss, of_tokens, _ = finished(call, operands, losses, metrics, norm, parts=parts)
        dhidden, dweight, dbias = gradients.finished(rounds_dbias=False)
        if dweight is not None:
            dweight = dweight.to(saved_dtype(call.dtype))
        labels = labels_of_dhidden(call, operands) if call.options.reduction == "none" else None
        return loss, of_tokens, SavedGradients(norm_in_backward, dhidden, dweight, dbias, labels)

    def add_chunks(
        self,
        sections: Sequence[Section],
        new_pass: Callable[[Section], Pass],
        gradients: Gradients,
        factors: Factors,
    ) -> list[ChunkResults]:
        """Add the gradients that ``factors`` make; return what the pass over each chunk yields.

        ``new_pass`` starts to gather the hidden states of a section, which then travel while the
        section before is computed, and its label logits during the GEMMs of that one's gradients.
        """
        added: list[ChunkResults] = []
        done = 0  # tokens of earlier sections
        is_first = True
        cache: ColumnCache | None = None
        forward_pass = new_pass(sections[0])
        device = forward_pass.logits.weight.device
        for section, following in with_next(sections):
            call = section.call
            upcoming = None
            if following is not None:
                forward_pass.gather.wait()  # ranks copy from the memory of one section at a time
                upcoming = new_pass(following)
            for tokens in [(0, call.T)] if section.is_cut else self.chunks():
                if cache is None:
                    lender = gradients.dweight if is_first else None
                    cache = self._chunk_cache(call, tokens[1] - tokens[0], device, lender)
                results, chunk = self._take_chunk(forward_pass, tokens, cache, factors, done)
                added.append(results)
                if is_first:
                    cache = None  # later chunks, of one size but for the last, share another
                    is_first = False
                if upcoming is not None:
                    forward_pass = upcoming  # frees hidden states, unless the gradients read them
                    forward_pass.begin_label_logits()
                gradients.add(chunk, section)
                del chunk  # the first cache is freed before the other is allocated
            done += call.T
        return added

    def _take_chunk(
        self,
        forward_pass: Pass,
        tokens: tuple[int, int],
        cache: ColumnCache,
        factors: Factors,
        done: int,
    ) -> tuple[ChunkResults, Chunk]:
        """Take the statistics of a chunk, which leave D in ``cache``; return them and its D.

        ``done`` tokens of earlier sections lie before those of the pass.
        """
        first, last = tokens
        call = forward_pass.call
        logits = forward_pass.logits.tokens(first, last)
        cache = cache.tokens(0, last - first)
        stats, loss = forward_pass.chunk_loss(tokens, cache)
        metrics = forward_pass.metrics(stats, tokens)
        rows, elements = factors(stats, logits, (done + first, done + last))
        reads_hidden = call.needs.weight or cache.width < call.V
        chunk = Chunk(
            tokens=tokens,
            labels=logits.labels,
            rows=rows,
            cache=cache,
            cached_reference=stats.reference,
            gather=forward_pass.gather if reads_hidden else None,
            logits=logits if reads_hidden else None,
            window_v=self.window_v,
            elements=elements,
            n_counted=logits.n_counted,
        )
        return ChunkResults(stats, loss, metrics), chunk

    def saved_like(self, call: Call, operands: Operands) -> Saved:
        def new(x: Tensor | None, dtype: torch.dtype, needed: bool) -> Tensor | None:
            return x.new_empty(x.shape, dtype=dtype) if needed and x is not None else None

        hidden = operands.hidden
        bias = operands.bias
        labels = operands.labels
        reduction = call.options.reduction
        weighs = operands.token_weight is not None and reduction != "none"
        divides = call.is_fp16 and (reduction == "mean" or weighs)
        of_each = reduction == "none"
        rows = hidden.shape[0]  # len would make a symbolic size a number
        return SavedGradients(
            norm=hidden.new_empty((), dtype=call.stats_dtype) if divides else None,
            dhidden=new(hidden, saved_dtype(call.dtype), call.needs.hidden),
            dweight=new(operands.trained, saved_dtype(call.dtype), call.needs.weight),
            dbias=new(bias, call.stats_dtype, call.needs.bias),
            labels=hidden.new_empty(rows, dtype=labels.dtype) if of_each else None,
        )

    def backward(self, request: Backward) -> Results:
        upstream = request.upstream
        if upstream.loss is None or upstream.of_metrics:
            raise NotImplementedError(
                "schedule='in_forward' has gradients of the loss only, and a gradient of lse, "
                "logprob or entropy was asked for; use schedule='recompute'"
            )
        return times_upstream(request)

    def _chunk_cache(
        self, call: Call, T: int, device: torch.device, lender: Tensor | None
    ) -> ColumnCache:
        """Return windows for the exponentials of T tokens, first those that lie in ``lender``.

        That is dweight of the first chunk, None of later ones.
        """
        dtype = call.cache_dtype
        windows = []
        lending = () if lender is None else self.lending
        column_bytes = T * dtype.itemsize
        for columns, row in lending:
            assert lender is not None
            flat = lender.view(-1)
            width = lender.shape[1]
            start = row * width
            # A shard with fewer rows than the plan holds fewer columns there.
            fitting = (call.V * width - start) * flat.element_size() // column_bytes
            columns = min(columns, fitting // INVARIANT_ROWS * INVARIANT_ROWS)
            if columns > 0:
                elements = columns * column_bytes // flat.element_size()
                windows.append(flat[start : start + elements].view(dtype).view(T, columns))
        lent = sum(window.shape[1] for window in windows)
        as_planned = lent == sum(columns for columns, _ in self.lending)
        columns = self.cached_columns(call.V, column_bytes, lent=lent, lent_as_planned=as_planned)
        if columns > lent:
            windows.append(new_window(T, columns - lent, dtype, device))
        return ColumnCache(tuple(windows))


def begun_pass(section: Section) -> Pass:
    """Return a pass over a section's logits that has begun to gather its hidden states."""
    forward_pass = Pass(section.call, section.operands)
    forward_pass.gather.start(beside=section.is_later)
    return forward_pass
