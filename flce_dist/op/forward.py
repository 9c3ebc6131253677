"""The steps of forward that all schedules share; ``autograd.py`` puts them in order.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size.
"""

import torch
from torch import Tensor

from flce_dist.kernels.column_cache import ColumnCache, new_window
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.kernels.token_loss_formulas import TokenStats, token_entropy
from flce_dist.op.call import Call
from flce_dist.parallel import collectives


def chunk_cache(call: Call, chunk: ShardLogits, dweight: Tensor | None, first: bool) -> ColumnCache:
    """Return windows for the exponentials of a chunk of tokens.

    Of the first chunk the leading ones lie in dweight's own memory, as ``plan.Lending`` says.
    """
    T, V, dtype = chunk.T, chunk.V, chunk.cache_dtype
    windows = []
    if first and dweight is not None and call.plan.lending is not None:
        flat = dweight.view(-1)
        for columns, row in call.plan.lending.windows:
            start, cells = row * chunk.H, T * columns * dtype.itemsize // flat.element_size()
            if start + cells <= V * chunk.H:  # not so in a shard smaller than the plan's
                window = flat[start : start + cells].view(dtype)
                windows.append(window.view(T, columns))
    columns = call.plan.cached_columns(V) if first else V
    rest = columns - sum(window.shape[1] for window in windows)
    if rest > 0:
        windows.append(new_window(T, rest, dtype, chunk.hidden.device))
    return ColumnCache(tuple(windows))


def token_loss(
    call: Call,
    logits: ShardLogits,
    gather: collectives.TokenGather,
    tokens: tuple[int, int],
    token_weight: Tensor | None,
    cache: ColumnCache,
) -> tuple[TokenStats, Tensor]:
    """Return the statistics of the whole vocabulary and the weighted loss of some tokens, each [T].

    They are whole pieces of the gather, each waited for where it is needed. All-reduces: the SUM of
    the label's logit [T] piece by piece, MAX of the others [T], SUM of the sums: 2 to 6 rows of [T]
    fp64, for ``impl="eager"`` 1 to 3 in the dtype of statistics. They are issued whether or not any
    row needs the rescue, so that ranks never disagree. ``cache`` receives D of its columns (see
    ``row_gradient``); its labels' columns now, not in backward: a saved tensor must not change
    between two backward passes.
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
        kernels.label_logit(part, vocab_size=call.shard.vocab_size, out=label_logit[here])
        pending = collectives.start_all_reduce(label_logit[here], group)
        # Behind this sum, which the statistics wait for, and beside them.
        gather.start(piece + 1)
        kernels.linear_stats(
            part,
            pending.wait(),
            cache=cache.tokens(here.start, here.stop),
            with_sum_z=with_sum_z,
            with_entropy=with_entropy,
            others_max=others_max[here],
            sums=sums[:, here],
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
        call.loss_terms,
        with_entropy=with_entropy,
    )
    if not call.rewrites(logits.hidden.dtype):  # else it is written where columns are
        for start, window in cache.pieces():
            kernels.write_label_value(
                window,
                logits.labels,
                label_value,
                vocab_start_index=logits.vocab_start_index + start,
                ignore_index=options.ignore_index,
            )
    return stats, loss


def reduced_loss(call: Call, loss: Tensor, norm: Tensor | None) -> Tensor:
    """Return the loss that was asked for of each token's [T]: in a caller's order, or reduced."""
    loss = call.order.restored(loss)  # before it is summed, so that this order decides the bits
    return loss if call.options.reduction == "none" else call.kernels.reduce_loss(loss, norm)


def metrics(stats: TokenStats, logits: ShardLogits) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(lse, logprob, entropy, correct)``, each [T]."""
    assert stats.others_max is not None
    correct = (stats.others_max <= stats.label_logit) & logits.counted
    return stats.lse, stats.logprob, token_entropy(stats), correct
