"""The schedule in_forward: loss and both gradients in forward, a chunk of tokens at a time.

T = tokens on the tensor-parallel group, V = real vocabulary rows here, H = hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.kernels.column_cache import ColumnCache, new_window
from flce_dist.kernels.shard_logits import ShardLogits
from flce_dist.op import forward
from flce_dist.op.backward import Chunk, Gradients, Results, sum_of_dhidden
from flce_dist.op.forward import Metrics
from flce_dist.op.prepare import Call, Operands
from flce_dist.parallel import transport
from flce_dist.parallel.vocab import INVARIANT_ROWS


class SavedGradients(NamedTuple):
    """The gradients of the loss; in fp16 those of the sum of losses."""

    norm: Tensor | None  # of a mean in fp16, a scalar
    dhidden: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None


def saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which dweight is saved: the sum over tokens may exceed fp16's range."""
    return torch.float32 if dtype == torch.float16 else dtype


def in_forward(
    call: Call, operands: Operands, needs: Sequence[bool]
) -> tuple[Tensor, Metrics, SavedGradients]:
    """Return the loss, the metrics, and the gradients of hidden, weight and bias that are needed.

    All exponentials of a chunk are held at once.
    """
    hidden, weight, bias, labels, token_weight = operands
    gather = transport.gather(hidden, call.order, call.sequence_group)
    logits = forward.shard_logits(call, gather.tokens, weight, bias, labels)
    norm = forward.loss_norm(call, labels, token_weight, logits.stats_dtype)
    # Before the loss scale is applied in backward, the gradient of a mean may underflow in fp16.
    late_norm, early_norm = (norm, None) if call.is_from_lse else (None, norm)
    gradients = _new_gradients(call, logits, weight, bias, needs)
    losses, metrics = [], []

    for first, last in call.plan.chunks():
        chunk = logits.tokens(first, last)
        weights = None if token_weight is None else token_weight[first:last]
        if first in (0, call.plan.first_t):
            cache = part = ColumnCache()  # frees the last one before the next is allocated
            cache = chunk_cache(call, chunk, gradients.dweight, first == 0)
        part = cache.tokens(0, last - first)
        stats, loss = forward.chunk_loss(call, logits, gather, (first, last), weights, part)
        losses.append(loss)
        metrics.append(forward.chunk_metrics(call, stats, chunk))
        rows = call.kernels.row_gradient(
            stats, chunk.labels, weights, early_norm, None, forward.loss_terms(call),
            from_lse=call.is_from_lse,
        )  # fmt: skip
        gradients.add(Chunk((first, last), chunk.labels, stats, rows, part, gather, chunk))

    del cache, part  # before dweight exists twice
    loss = forward.reduced_loss(call, torch.cat(losses), norm)
    dhidden, dweight, dbias = gradients.finished()
    if dweight is not None:
        dweight = dweight.to(saved_dtype(weight.dtype))
    saved = SavedGradients(late_norm, dhidden, dweight, dbias)
    return loss, forward.restored_metrics(call, metrics), saved


def scaled(
    call: Call,
    saved: SavedGradients,
    upstream: Sequence[Tensor | None],
    *,
    reuses_saved: bool,
    rounds_dweight: bool = True,
) -> Results:
    """Return the saved gradients times the scalar upstream gradient of the loss.

    With ``reuses_saved`` they are scaled in place, which costs nothing if the factor is 1. dweight
    stays in its saved dtype unless ``rounds_dweight``.
    """
    dloss, *dmetrics = upstream
    if dloss is None or any(d is not None for d in dmetrics):
        raise NotImplementedError(
            "schedule='in_forward' has gradients of the loss only, and a gradient of lse, "
            "logprob or entropy was asked for; use schedule='recompute'"
        )
    norm, *gradients = saved
    factor = dloss if norm is None else dloss / norm

    def times_factor(gradient: Tensor | None, *, rounds: bool = True) -> Tensor | None:
        if gradient is None:
            return None
        dtype = call.dtype if rounds else gradient.dtype
        in_place = reuses_saved and gradient.dtype == dtype
        result = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
        call.kernels.scale(gradient, factor, out=result)
        return result

    dhidden, dweight, dbias = gradients
    return (
        times_factor(dhidden),
        times_factor(dweight, rounds=rounds_dweight),
        times_factor(dbias),
    )


def _new_gradients(
    call: Call, logits: ShardLogits, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> Gradients:
    """Allocate the gradients. dweight accumulates in fp32 for several chunks and for fp16."""
    dhidden = dweight = dbias = None
    if needs[0]:
        dhidden = sum_of_dhidden(call, logits.T, weight)
    if needs[1]:
        rounds_once = len(call.plan.chunks()) == 1 and not call.is_from_lse
        dtype = weight.dtype if rounds_once else logits.stats_dtype
        dweight = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    if needs[2]:
        assert bias is not None
        dbias = torch.zeros_like(bias, dtype=logits.stats_dtype)
    return Gradients(call, weight, dhidden, dweight, dbias)


def chunk_cache(call: Call, chunk: ShardLogits, dweight: Tensor | None, first: bool) -> ColumnCache:
    """Return windows for the exponentials of a chunk of tokens.

    The leading windows of the first chunk lie in dweight's own memory, see ``lending.py``.
    """
    T, V, dtype = chunk.T, chunk.V, chunk.cache_dtype
    windows, column_bytes = [], T * dtype.itemsize
    if first and dweight is not None:
        flat = dweight.view(-1)
        for columns, row in call.plan.lending:
            start = row * chunk.H
            # A shard with fewer rows than the plan holds fewer columns there.
            fitting = (V * chunk.H - start) * flat.element_size() // column_bytes
            columns = min(columns, fitting // INVARIANT_ROWS * INVARIANT_ROWS)
            if columns > 0:
                elements = columns * column_bytes // flat.element_size()
                windows.append(flat[start : start + elements].view(dtype).view(T, columns))
    lent = sum(window.shape[1] for window in windows)
    rest = call.plan.cached_columns(V, column_bytes, lent) - lent
    if rest > 0:
        windows.append(new_window(T, rest, dtype, chunk.hidden.device))
    return ColumnCache(tuple(windows))
