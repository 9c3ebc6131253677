"""One pass over this shard's logits: statistics and loss.  T = tokens, V = real rows here."""

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.core.call import Call, Operands, gathered_logits
from flce_dist.core.interface import Metrics
from flce_dist.core.sections import joined, tokens_here
from flce_dist.kernels.logits.operands import ColumnCache, part_of
from flce_dist.kernels.logits.target import Target
from flce_dist.kernels.rows.formulas import TokenStats, token_entropy
from flce_dist.parallel import collectives
from flce_dist.parallel.counted import put_back


class Pass:
    """One pass over the logits of all tokens, in one chunk of them or several.

    ``gather`` brings hidden of all ranks, [T, H]. ``target`` is what the loss needs; a schedule may
    ask for more, for tiles of all tokens in one chunk.
    """

    def __init__(self, call: Call, operands: Operands):
        self.call = call
        self.token_weight = operands.token_weight
        self.gather, self.logits = gathered_logits(call, operands)
        self._label_logit: Tensor | None = None
        self._label_sum: dist.Work | None = None  # in flight
        self.target = Target(
            with_entropy=call.options.with_metrics,
            with_sum_z=call.options.label_smoothing != 0.0,
        )

    def chunk_loss(self, tokens: tuple[int, int], cache: ColumnCache) -> tuple[TokenStats, Tensor]:
        """Return statistics over the whole vocabulary and the weighted loss of a chunk, each [T].

        All-reduces, whether or not a row needs the rescue: before the first chunk SUM of the label
        logits of all tokens; for each chunk MAX of the other logits [T], SUM of 3 to 7 rows [T]
        fp64 (eager: 1 to 3, in stats_dtype).

        ``cache`` receives D of its columns, at the labels too: a saved tensor must not change
        between two backward passes. With ``target.named`` D at these ids is not written.
        """
        call = self.call
        kernels = call.kernels
        group = call.tp_group

        first, last = tokens
        logits = self.logits.tokens(first, last)
        target = self.target
        if target.named is not None:
            target = target.rows(slice(first, last))
        sums = kernels.new_sums(logits, target)
        label_logit = part_of(self._label_logits(), first, last)
        others_max = torch.empty_like(label_logit)
        kernels.linear_stats(
            logits, label_logit, target, cache=cache, others_max=others_max, sums=sums
        )
        others_max = collectives.all_reduce_max(others_max, group)
        kernels.rescue(logits, label_logit, others_max, sums, target, cache=cache)
        sums = collectives.all_reduce_sum(sums, group)
        weights = self.token_weight
        if weights is not None:
            weights = part_of(weights, first, last)
        label_windows = [(logits.vocab_start_index + start, x) for start, x in cache.with_starts()]
        if call.rescales_cache or target.named is not None:
            label_windows = []  # backward writes D at the labels
        return kernels.token_loss(
            logits.labels,
            weights,
            label_logit,
            others_max,
            sums,
            call.loss_terms,
            with_entropy=target.with_entropy,
            inverse_temperature=logits.inverse_temperature,
            windows=label_windows,
        )

    def begin_label_logits(self) -> None:
        """Compute the label logits of all tokens, and begin their sum over ranks."""
        call = self.call
        self.gather.wait()
        self._label_logit = call.kernels.logits_at_ids(
            self.logits, self.logits.labels, None, vocab_size=call.vocab_size
        )
        self._label_sum = collectives.begin_all_reduce_sum(self._label_logit, call.tp_group)

    def _label_logits(self) -> Tensor:
        """Return the logits of all tokens' labels, the same on every rank."""
        if self._label_logit is None:
            self.begin_label_logits()
        if self._label_sum is not None:
            self._label_sum.wait()
            self._label_sum = None
        assert self._label_logit is not None
        return self._label_logit

    def metrics(self, stats: TokenStats, tokens: tuple[int, int]) -> Metrics:
        """Return the metrics of a chunk if they are asked for."""
        if not self.call.options.with_metrics:
            return Metrics()
        assert stats.others_max is not None
        counted = self.logits.counted[slice(*tokens)]
        correct = (stats.others_max <= stats.label_logit) & counted
        return Metrics(stats.lse, stats.logprob, token_entropy(stats), correct)


def early_norm(call: Call, operands: Operands) -> Tensor | None:
    """Return what a mean divides by, a scalar on the device, before the losses are known."""
    if call.options.reduction != "mean":
        return None
    return call.kernels.loss_norm(*_of_norm(call, operands), call.stats_dtype)


def finished(
    call: Call,
    operands: Operands,
    losses: list[Tensor],
    metrics: list[Metrics],
    norm: Tensor | None = None,
    *,
    parts: int = 1,
) -> tuple[Tensor, Metrics, Tensor | None]:
    """Reduce the losses of all chunks; return them, the metrics, and what a mean divides by.

    Losses and metrics of tokens are in the caller's order. ``norm`` is that of ``early_norm``, or
    None if it is to be computed here. ``parts`` is that of sections, if chunks are sections.
    """
    options = call.options
    loss = losses[0] if len(losses) == 1 else joined(losses, parts)
    sums_own = options.reduction == "sum" and options.data_parallel  # the tokens of this rank
    if options.reduction == "none" or sums_own:
        loss = put_back(loss, operands.places, call.T_all)
    if sums_own:
        loss = tokens_here(call, loss)
    if options.reduction == "mean" and norm is None:
        loss, norm = call.kernels.mean_loss(loss, *_of_norm(call, operands))
    elif options.reduction != "none":
        loss = call.kernels.reduce_loss(loss, norm)
    if not options.with_metrics:
        return loss, Metrics(), norm
    # Copies, also of one chunk: what an operator returns must not be what it saves.
    in_order = (joined(of_chunks, parts) for of_chunks in zip(*metrics, strict=True))
    lse, logprob, entropy, correct = (put_back(x, operands.places, call.T_all) for x in in_order)
    return loss, Metrics(lse, logprob, entropy, correct), norm


def _of_norm(call: Call, operands: Operands) -> tuple[Tensor, Tensor | None, int]:
    return operands.labels, operands.token_weight, call.options.ignore_index
