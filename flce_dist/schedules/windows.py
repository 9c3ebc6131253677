"""The schedules recompute and cached.  T = tokens of the group, V = real rows here, H = hidden."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands, gathered_logits
from flce_dist.core.dlogits import Chunk
from flce_dist.core.gradients import Gradients, row_gradient
from flce_dist.core.interface import Backward, Metrics, Results, Saved
from flce_dist.core.statistics import Pass, finished
from flce_dist.kernels.logits.operands import ColumnCache, new_window
from flce_dist.kernels.rows.formulas import RowGradient, TokenStats
from flce_dist.parallel.vocab import INVARIANT_ROWS


class WindowsSaved(NamedTuple):
    norm: Tensor | None  # of a mean, a scalar
    cache: Tensor | None  # D of the leading columns, [T, cached_v]
    entropy: Tensor | None  # [T], with metrics
    label_logit: Tensor  # [T], as the next two
    reference: Tensor
    others: Tensor


@dataclass(frozen=True)
class Sizes:
    """What is held of the logits of T tokens and V rows, those of the largest even shard."""

    T: int
    V: int
    cached_v: int  # leading columns, held from the statistics to the gradients
    window_v: int  # of the others, computed again, at a time
    logits_bytes: int  # of both, beside ``lent`` columns, which lie in other memory
    limit: int | None  # the budget
    converts: bool  # whether cached columns need a window, too

    skips_ignored: ClassVar[bool] = True

    def cached_columns(self, V: int, column_bytes: int, *, lent: int, lent_as_planned: bool) -> int:
        """Return how many columns a rank of ``V`` rows caches: the plan's, or fewer by the limit.

        The plan keeps the limit for an even share of rows, and where dweight holds the columns that
        it is to lend; ``lent`` are those that it does.
        """
        planned = V if self.cached_v >= self.V else min(self.cached_v, V)
        if self.limit is None or (V <= self.V and lent_as_planned):
            return planned
        most = lent + max(self.limit, self.logits_bytes) // max(1, column_bytes)
        if planned + (self.window_v if planned < V or self.converts else 0) <= most:
            return planned
        fitting = (most - self.window_v) // INVARIANT_ROWS * INVARIANT_ROWS
        return max(lent, min(planned, fitting))


@dataclass(frozen=True)
class Windows(Sizes):
    """Cached columns keep their D from forward to backward, which computes the others again.

    Forward: one GEMM of 2 T H V flop. Under sequence parallelism a gather of hidden; the
    all-reduces of ``chunk_loss``.
    Backward: two GEMMs of 2 T H V flop, a third for the columns that were not cached, and for all
    if there is a gradient of the entropy. Under sequence parallelism a gather of hidden, in flight
    during dhidden of cached columns; the sum of dhidden over ranks, in flight during the last
    dweight.
    """

    keeps_operands: ClassVar[bool] = True

    def forward(self, call: Call, operands: Operands) -> tuple[Tensor, Metrics, Saved]:
        forward_pass = Pass(call, operands)
        tokens = (0, call.T)
        cache = self.new_cache(call, operands.hidden.device)
        windows = ColumnCache(() if cache is None else (cache,))
        stats, loss = forward_pass.chunk_loss(tokens, windows)
        metrics = forward_pass.metrics(stats, tokens)
        loss, of_tokens, norm = finished(call, operands, [loss], [metrics])
        saved = WindowsSaved(
            norm, cache, metrics.entropy, stats.label_logit, stats.reference, stats.others
        )
        return loss, of_tokens, saved

    def saved_like(self, call: Call, operands: Operands) -> Saved:
        def new(*shape: int) -> Tensor:
            return operands.hidden.new_empty(shape, dtype=call.stats_dtype)

        T = call.T
        options = call.options
        return WindowsSaved(
            new() if options.reduction == "mean" else None,
            self.new_cache(call, operands.hidden.device),
            new(T) if options.with_metrics else None,
            new(T),
            new(T),
            new(T),
        )

    def backward(self, request: Backward) -> Results:
        norm, cache, entropy, *of_tokens = WindowsSaved(*request.saved)
        call = request.call
        stats = TokenStats(*of_tokens)
        rows = row_gradient(request, stats, norm, entropy=entropy, from_lse=call.is_fp16)
        if call.is_fp16:
            rows = rows.half_folded()
        gradients, chunk = self.opened(request, stats.reference, rows, cache)
        if request.upstream.entropy is not None:
            again = _recomputed(request.upstream.entropy, call.T, chunk.n_counted)
            chunk = chunk._replace(again=again)
        gradients.add(chunk)
        return closed(gradients, chunk)

    def opened(
        self, request: Backward, reference: Tensor, rows: RowGradient, cache: Tensor | None
    ) -> tuple[Gradients, Chunk]:
        """Return the sums of gradients, and the one chunk of dlogits that ``rows`` describes.

        ``cache`` are exponentials relative to ``reference`` [T].
        """
        call = request.call
        operands = request.operands
        assert operands is not None
        gather = None
        logits = None
        # Decided by facts that all ranks share, not by which upstream gradients this rank got:
        # with that of the entropy cached columns are computed again.
        some_recompute = self.cached_v < self.V or (
            call.options.vocab_range is not None and self.limit is not None  # the larger shards
        )
        if call.needs.weight or call.options.with_metrics or some_recompute:
            gather, logits = gathered_logits(call, operands)
            gather.start()

        gradients = Gradients(call, operands, request.accumulator)
        windows = ColumnCache(() if cache is None else (cache,))
        chunk = Chunk(
            tokens=(0, call.T),
            labels=operands.labels,
            rows=rows,
            cache=windows,
            cached_reference=reference,
            gather=gather,
            logits=logits,
            window_v=self.window_v,
            n_counted=operands.n_counted,
        )
        return gradients, chunk

    def new_cache(self, call: Call, device: torch.device) -> Tensor | None:
        column_bytes = call.T * call.cache_dtype.itemsize
        columns = self.cached_columns(call.V, column_bytes, lent=0, lent_as_planned=True)
        return new_window(call.T, columns, call.cache_dtype, device) if columns else None


def _recomputed(dentropy: Tensor, T: int, n_counted: Tensor | None) -> Tensor:
    """Return [] int32: how many tokens' cached columns a gradient of the entropy needs again.

    All, or none if it is 0, as compiled code makes it where nothing asks for it. The host does not
    know which.
    """
    count = dentropy.new_full((), T, dtype=torch.int32) if n_counted is None else n_counted
    return count.where(dentropy.any(), 0)


def closed(gradients: Gradients, chunk: Chunk) -> Results:
    """Return the gradients, once the chunk has been added."""
    if chunk.gather is not None:
        chunk.gather.wait()  # even if nothing read it: copies must not outlive their buffer
    return gradients.finished()
