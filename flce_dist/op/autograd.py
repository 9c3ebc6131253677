"""The schedules: which kernel and which collective comes when.

T = tokens on the tensor-parallel group, V = vocabulary rows here, H = hidden size, P = ranks.
A token's way: gather (under sequence parallelism), statistics of this shard, merge over ranks,
loss; in backward dlogits by pieces, two matrix products each, and the sum of dhidden over ranks.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from flce_dist.kernels import token_gradient_formulas as row_gradient
from flce_dist.kernels.column_cache import ColumnCache, new_window
from flce_dist.kernels.token_gradient_formulas import MetricGradients
from flce_dist.kernels.token_loss_formulas import TokenStats
from flce_dist.op import forward as steps
from flce_dist.op.call import Call
from flce_dist.op.dlogits import Dlogits, LateLogits, from_lse
from flce_dist.op.gradients import Gradients, in_forward_dtype

Pass = TypeVar("Pass", bound=Callable[..., Any])


def on_its_device(forward: Pass) -> Pass:
    """Compute on hidden's device, where Triton launches, and in the dtypes that were prepared.

    Autocast has had its say by then. It must not reach into the products, in compiled code either.
    """

    @functools.wraps(forward)
    def run(ctx, hidden, *args):
        with torch.cuda.device_of(hidden), _without_autocast(hidden.device.type):
            return forward(ctx, hidden, *args)

    return cast(Pass, run)


def first_order(backward: Pass) -> Pass:
    """Refuse to be differentiated; compute on forward's device and, under autocast, in its dtypes.

    ``once_differentiable`` would not do: it lets a gradient penalty pass that then has no effect.
    """

    @functools.wraps(backward)
    def run(ctx, *grads):
        if torch.is_grad_enabled():  # the engine's way to say create_graph=True
            raise NotImplementedError(
                "linear_cross_entropy has no second derivative: create_graph=True is not "
                "supported; differentiate flce_dist.reference instead"
            )
        upstream = next((g for g in grads if g is not None), None)
        if upstream is None:  # nothing depends on the outputs
            return (None,) * 6
        with torch.cuda.device_of(upstream), _without_autocast(upstream.device.type):
            return backward(ctx, *grads)

    return cast(Pass, run)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()  # costs the host less
    return torch.autocast(device_type, enabled=False)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """``loss, lse, logprob, entropy, correct`` under the schedules recompute and cached.

    Forward: one product of 2 T H V flop. Under sequence parallelism a gather of hidden in two
    pieces, the second in flight during the logits of the first; then all-reduces: SUM of label
    logits [T], MAX [T], SUM of sums [2 to 6, T] fp64 (eager: 1 to 3 rows in the dtype of
    statistics). Saved: the local hidden, weight, bias, labels, three [T] vectors, and the cached
    columns [T, cached_v].

    Backward: two products of 2 T H V flop, a third over the columns that were not cached. Under
    sequence parallelism a gather of hidden (times the tokens' scales, if all columns were cached),
    in flight while cached columns make dhidden or while dlogits of its first piece are computed;
    then the sum of dhidden over ranks (scattered, else all-reduced), in flight during the last
    dweight.
    """

    @staticmethod
    @on_its_device
    def forward(ctx, hidden, weight, bias, labels, token_weight, call: Call):
        ctx.set_materialize_grads(False)
        ctx.call = call
        gather = call.gather(hidden)
        logits = call.logits(gather.tokens, weight, bias, labels)
        cache, columns = None, call.plan.cached_columns(logits.V)
        if columns:
            cache = new_window(logits.T, columns, logits.cache_dtype, hidden.device)
        windows = ColumnCache(() if cache is None else (cache,))
        stats, loss = steps.token_loss(call, logits, gather, (0, logits.T), token_weight, windows)
        norm = call.loss_norm(labels, token_weight, logits.stats_dtype)
        entropy: Tensor | None = None
        metrics: tuple[Tensor | None, ...] = (None,) * 4
        if call.options.with_metrics:
            walked = steps.metrics(stats, logits)
            entropy, metrics = walked[2], tuple(map(call.order.restored, walked))
            ctx.mark_non_differentiable(metrics[-1])
        ctx.save_for_backward(
            hidden, weight, bias, labels, token_weight, norm, cache, entropy, *stats[:3]
        )
        return steps.reduced_loss(call, loss, norm), *metrics

    @staticmethod
    @first_order
    def backward(ctx, dloss, dlse, dlogprob, dentropy, _dcorrect):
        call: Call = ctx.call
        hidden, weight, bias, labels, token_weight, norm, cache, entropy, *stats = ctx.saved_tensors
        upstream = (dloss, dlse, dlogprob, dentropy)
        dloss, *dmetrics = (
            g if g is None or g.dim() == 0 else call.order.walked(g) for g in upstream
        )
        stats, metrics = TokenStats(*stats), MetricGradients(*dmetrics)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]

        if dloss is None:
            dloss = torch.zeros_like(stats.others)
        of_loss = (labels, token_weight, norm, dloss, call.loss_terms)
        if metrics.any() or call.options.smoothing_needs_logits:
            cache = None  # exponentials alone do not express this gradient: recompute every column
            token_dloss = row_gradient.token_dloss(stats.others, *of_loss)
            rows = row_gradient.row_gradient_with_metrics(
                stats, token_dloss, metrics, entropy, call.loss_terms
            )
        else:
            rows = call.kernels.row_gradient(stats, *of_loss, from_lse=from_lse(hidden.dtype))

        # Decided from facts that all ranks share, not from which upstream gradients this rank got:
        # every rank gathers the same or none does.
        logits = scaled_hidden = gather = None
        if call.options.sequence_parallel and call.lacks_only_scales(hidden.dtype):
            if need_weight:
                gather = scaled_hidden = call.gather_scaled(hidden, rows, labels)
        elif need_weight or call.options.with_metrics or call.plan.cached_v < call.plan.V:
            gather = call.gather(hidden)
            late = call.logits(gather.tokens, weight, bias, labels)
            logits = LateLogits(late, gather, call.order.pieces)
        if gather is not None:
            gather.start_all()

        sum_of_dhidden = dweight = dbias = None
        if need_hidden:
            sum_of_dhidden = call.sum_of_dhidden(len(labels), weight)
        if need_weight:
            dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        if need_bias:
            dbias = torch.zeros_like(bias)
        results = Gradients(call, hidden.dtype, sum_of_dhidden, dweight, dbias)
        windows = ColumnCache(() if cache is None else (cache,))
        dlogits = Dlogits(call, labels, stats, rows, windows, hidden.dtype, logits, scaled_hidden)
        results.add((0, len(labels)), weight, dlogits)
        if gather is not None:
            gather.wait_all()  # also where nothing needed it: its memory must outlive it
        # Before there is memory for the sum of dhidden.
        del windows, dlogits, logits, scaled_hidden, gather
        return *results.finished(), None, None, None


class InForwardFunction(torch.autograd.Function):
    """``loss, lse, logprob, entropy, correct`` under the schedule in_forward.

    Forward: three products of 2 T H V flop, token chunk by token chunk. All of a chunk's
    exponentials are held, those of the first one partly in dweight's own memory (``plan.Lending``);
    several chunks accumulate dweight in fp32. Under sequence parallelism a gather of hidden in
    pieces, each next one in flight during the work on the one before, and the sum over ranks of
    each chunk's dhidden, in flight from its last dweight on; the all-reduces of
    ``token_loss`` per chunk. Saved: both gradients of the loss (in fp16 of the sum of losses).

    Backward: those times the scalar upstream gradient, at no cost if it is 1. No collective.
    """

    @staticmethod
    @on_its_device
    def forward(ctx, hidden, weight, bias, labels, token_weight, call: Call):
        ctx.set_materialize_grads(False)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        gather = call.gather(hidden)
        logits = call.logits(gather.tokens, weight, bias, labels)
        chunks = call.plan.chunks()
        norm = call.loss_norm(labels, token_weight, logits.stats_dtype)
        # The gradient of a mean may be too small for fp16 before a loss scale arrives.
        late_norm = norm if hidden.dtype == torch.float16 else None

        sum_of_dhidden = dweight = dbias = None
        if need_hidden:
            sum_of_dhidden = call.sum_of_dhidden(logits.T, weight)
        if need_weight:
            rounds_once = len(chunks) == 1 and weight.dtype != torch.float16
            dtype = weight.dtype if rounds_once else logits.stats_dtype
            dweight = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        if need_bias:
            dbias = torch.zeros_like(bias, dtype=logits.stats_dtype)
        results = Gradients(call, hidden.dtype, sum_of_dhidden, dweight, dbias)
        losses, metrics = [], []

        for first, last in chunks:
            chunk, weights = logits.tokens(first, last), token_weight
            if token_weight is not None:
                weights = token_weight[first:last]
            if first in (0, call.plan.first_t):
                cache = ColumnCache()  # lets go of the last one before there is another
                cache = steps.chunk_cache(call, chunk, dweight, first == 0)
            cache = cache.tokens(0, last - first)
            stats, loss = steps.token_loss(call, logits, gather, (first, last), weights, cache)
            losses.append(loss)
            if call.options.with_metrics:
                metrics.append(steps.metrics(stats, chunk))
            rows = call.kernels.row_gradient(
                stats, chunk.labels, weights, None if late_norm is not None else norm, None,
                call.loss_terms,
                from_lse=from_lse(hidden.dtype),
            )  # fmt: skip
            here = LateLogits(chunk, gather)
            dlogits = Dlogits(call, chunk.labels, stats, rows, cache, hidden.dtype, here)
            results.add((first, last), weight, dlogits)
            del dlogits  # it holds the cache

        del cache  # before dweight is there twice
        loss = steps.reduced_loss(call, torch.cat(losses), norm)
        dhidden, dweight, dbias = results.finished()
        if dweight is not None:
            dweight = dweight.to(in_forward_dtype(weight.dtype))
        ctx.save_for_backward(late_norm, dhidden, dweight, dbias)
        ctx.call, ctx.dtype, ctx.reuses_saved = call, weight.dtype, True
        if not call.options.with_metrics:
            return loss, None, None, None, None
        merged = [call.order.restored(torch.cat(parts)) for parts in zip(*metrics, strict=True)]
        ctx.mark_non_differentiable(merged[-1])
        return loss, *merged

    @staticmethod
    @first_order
    def backward(ctx, dloss, *dmetrics):
        if any(d is not None for d in dmetrics):
            raise NotImplementedError(
                "schedule='in_forward' has gradients of the loss only, and a gradient of lse, "
                "logprob or entropy was asked for; use schedule='recompute'"
            )
        norm, *gradients = ctx.saved_tensors
        factor = dloss if norm is None else dloss / norm
        once = ctx.reuses_saved and not _keeps_graph()
        results: list[Tensor | None] = []
        for gradient in gradients:
            if gradient is None:
                results.append(None)
                continue
            # If backward cannot come again, the saved gradient itself becomes the result.
            own = once and gradient.dtype == ctx.dtype
            result = gradient if own else torch.empty_like(gradient, dtype=ctx.dtype)
            ctx.call.kernels.scale(gradient, factor, out=result)
            results.append(result)
        return *results, None, None, None


def _keeps_graph() -> bool:
    """Whether this backward was asked to retain the graph. PyTorch has no public name for it."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def function_of(call: Call) -> type[torch.autograd.Function]:
    """Return the Function of a call's schedule."""
    in_forward = call.plan.schedule == "in_forward"
    return InForwardFunction if in_forward else LinearCrossEntropyFunction
