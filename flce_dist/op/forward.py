"""Forward: the statistics of this shard's logits, merged over ranks, and the loss.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.kernels.column_cache import ColumnCache, new_window
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss_formulas import LossTerms, TokenStats, token_entropy
from flce_dist.op.prepare import Call, Operands
from flce_dist.parallel import collectives, transport
from flce_dist.parallel.collectives import TokenGather
from flce_dist.parallel.vocab import INVARIANT_ROWS


class Metrics(NamedTuple):
    """What one pass over the logits yields besides the loss; None if not asked for."""

    lse: Tensor | None = None  # [T], as the next three
    logprob: Tensor | None = None
    entropy: Tensor | None = None
    correct: Tensor | None = None
    kept_share: Tensor | None = None  # scalars
    rank_one_mass: Tensor | None = None


class Saved(NamedTuple):
    """What backward needs from forward besides the operands."""

    norm: Tensor | None  # of a mean, a scalar
    cache: Tensor | None  # D of the leading columns, [T, cached_v]
    entropy: Tensor | None  # [T], with metrics
    label_logit: Tensor  # [T]
    reference: Tensor  # [T]
    others: Tensor  # [T]
    kept: Tensor | None = None  # of filtered gradients: which tiles, [blocks, tiles] bool
    mass: Tensor | None = None  # each token's probability in tiles that are not kept, [tiles, T]

    @property
    def stats(self) -> TokenStats:
        return TokenStats(self.label_logit, self.reference, self.others)


def forward(call: Call, operands: Operands) -> tuple[Tensor, Metrics, Saved]:
    """Return the loss, the metrics and what backward needs: all schedules but in_forward."""
    hidden, weight, bias, labels, token_weight = operands
    gather = transport.gather(hidden, call.order, call.sequence_group)
    logits = shard_logits(call, gather.tokens, weight, bias, labels)
    column_bytes = logits.T * logits.cache_dtype.itemsize
    cache, columns = None, call.plan.cached_columns(logits.V, column_bytes)
    if columns:
        cache = new_window(logits.T, columns, logits.cache_dtype, hidden.device)
    windows = ColumnCache(() if cache is None else (cache,))
    kept = mass = tiles = None
    if call.plan.schedule == "filtered":
        tiles = call.kernels.new_tile_stats(logits)
    stats, loss = chunk_loss(call, logits, gather, (0, logits.T), token_weight, windows, tiles)
    if tiles is not None:
        kept, mass = call.kernels.kept_tiles(logits, tiles, stats, call.options.filter_eps)
    norm = loss_norm(call, labels, token_weight, logits.stats_dtype)
    metrics = chunk_metrics(call, stats, logits)
    saved = Saved(norm, cache, metrics.entropy, *stats[:3], kept, mass)
    metrics = restored_metrics(call, [metrics])
    if call.options.with_metrics and kept is not None and mass is not None:
        share, left = approximation(call, logits, kept, mass)
        metrics = metrics._replace(kept_share=share, rank_one_mass=left)
    return reduced_loss(call, loss, norm), metrics, saved


def chunk_loss(
    call: Call,
    logits: ShardLogits,
    gather: TokenGather,
    tokens: tuple[int, int],
    token_weight: Tensor | None,
    cache: ColumnCache,
    tiles: Tensor | None = None,
) -> tuple[TokenStats, Tensor]:
    """Return statistics over the whole vocabulary and the weighted loss of a chunk, each [T].

    ``tokens`` (first, last) are whole pieces of the gather; each piece is waited for just before
    its logits are computed. All-reduces: SUM of label logits [T] per piece, MAX of the other logits
    [T], SUM of 2 to 6 rows [T] fp64 (eager: 1 to 3 rows in the dtype of statistics). They do not
    depend on whether any row needs the rescue, so ranks never disagree.

    ``cache`` receives D of its columns (``token_gradient_formulas``). D at the labels is written
    now, not in backward: a saved tensor must not change between two backward passes. ``tiles``
    receives the statistics of tiles, if given.
    """
    options, kernels, group = call.options, call.kernels, call.tp_group
    with_entropy, with_sum_z = options.with_metrics, options.label_smoothing != 0.0

    first, last = tokens
    logits = logits.tokens(first, last)
    label_logit = logits.hidden.new_empty(logits.T, dtype=logits.stats_dtype)
    others_max = torch.empty_like(label_logit)
    sums = kernels.new_sums(logits, with_sum_z=with_sum_z, with_entropy=with_entropy)
    for piece, (start, end) in call.order.between(first, last):
        gather.wait(piece)
        here = slice(start - first, end - first)
        part = logits.tokens(here.start, here.stop)
        kernels.label_logit(part, vocab_size=call.vocab_size, out=label_logit[here])
        pending = collectives.start_all_reduce(label_logit[here], group)
        # Behind the all-reduce, which the statistics wait for: a group's collectives run in order.
        gather.start(piece + 1)
        kernels.linear_stats(
            part,
            pending.wait(),
            cache=cache.tokens(here.start, here.stop),
            with_sum_z=with_sum_z,
            with_entropy=with_entropy,
            others_max=others_max[here],
            sums=sums[:, here],
            tiles=None if tiles is None else tiles[:, :, here],
        )

    others_max = collectives.all_reduce_max(others_max, group)
    sums = kernels.rescue(
        logits, label_logit, others_max, sums, cache=cache, with_entropy=with_entropy
    )
    sums = collectives.all_reduce_sum(sums, group)
    stats, loss, label_value = kernels.token_loss(
        logits.labels,
        token_weight,
        label_logit,
        others_max,
        sums,
        loss_terms(call),
        with_entropy=with_entropy,
    )
    if not call.rescales_cache:  # else backward writes D at the labels
        for start, window in cache.with_starts():
            kernels.write_label_value(
                window,
                logits.labels,
                label_value,
                vocab_start_index=logits.vocab_start_index + start,
                ignore_index=options.ignore_index,
            )
    return stats, loss


def chunk_metrics(call: Call, stats: TokenStats, logits: ShardLogits) -> Metrics:
    """Return the metrics of a chunk's tokens, if they are asked for."""
    if not call.options.with_metrics:
        return Metrics()
    assert stats.others_max is not None
    correct = (stats.others_max <= stats.label_logit) & logits.counted
    return Metrics(stats.lse, stats.logprob, token_entropy(stats), correct)


def restored_metrics(call: Call, chunks: list[Metrics]) -> Metrics:
    """Return the metrics of all tokens in the caller's order; nothing is filtered."""
    if not call.options.with_metrics:
        return Metrics()
    per_token = zip(*(chunk[:4] for chunk in chunks), strict=True)
    metrics = Metrics(*(call.order.restored(torch.cat(parts)) for parts in per_token))
    assert metrics.lse is not None
    one, zero = metrics.lse.new_ones(()), metrics.lse.new_zeros(())
    return metrics._replace(kept_share=one, rank_one_mass=zero)


def approximation(
    call: Call, logits: ShardLogits, kept: Tensor, mass: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the share of all ranks' tiles that are kept, and the mean mass in the others.

    All-reduces three numbers.
    """
    counted = logits.counted.sum()
    sums = counted.new_zeros(3, dtype=logits.stats_dtype)
    sums[0], sums[1] = kept.sum(), mass.sum(dtype=sums.dtype)
    sums[2:].fill_(kept.numel())  # assigning a number copies it from the host
    kept_sum, left, tiles = collectives.all_reduce_sum(sums, call.tp_group)
    return kept_sum / tiles, left / counted.clamp_min(1)


def reduced_loss(call: Call, loss: Tensor, norm: Tensor | None) -> Tensor:
    """Reduce the losses of all tokens [T] as ``reduction`` says."""
    loss = call.order.restored(loss)  # before the sum, so that the caller's order decides its bits
    return loss if call.options.reduction == "none" else call.kernels.reduce_loss(loss, norm)


def loss_norm(
    call: Call, labels: Tensor, token_weight: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return the divisor of a mean, a scalar on the device; None for other reductions."""
    if call.options.reduction != "mean":
        return None
    if token_weight is not None:  # the caller's order decides the bits
        labels, token_weight = map(call.order.restored, (labels, token_weight))
    return call.kernels.loss_norm(labels, token_weight, call.options.ignore_index, dtype)


def loss_terms(call: Call) -> LossTerms:
    options = call.options
    return LossTerms(
        label_smoothing=options.label_smoothing,
        z_loss_weight=options.z_loss_weight,
        vocab_size=call.vocab_size,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
        ignore_index=options.ignore_index,
    )


def shard_logits(
    call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> ShardLogits:
    """Describe this shard's logits over its real rows; hidden and labels are of all T tokens."""
    options = call.options
    return ShardLogits(
        hidden=hidden,
        weight=weight[: call.V],
        bias=None if bias is None else bias[: call.V].contiguous(),
        labels=labels,
        vocab_start_index=call.vocab_start_index,
        ignore_index=options.ignore_index,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
        group_v=INVARIANT_ROWS if options.tp_invariant else None,
    )
