"""The autograd Functions: what is saved, and which schedule computes forward and backward.

T = tokens on the tensor-parallel group, V = vocabulary rows here, H = hidden size, P = ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flce_dist.op.backward import Results, backward
from flce_dist.op.forward import Metrics, Saved, forward
from flce_dist.op.in_forward import SavedGradients, in_forward, scaled
from flce_dist.op.main_grad import MainGrad
from flce_dist.op.prepare import Call, Operands


class LinearCrossEntropyFunction(torch.autograd.Function):
    """``loss, lse, logprob, entropy, correct`` under the schedules recompute and cached.

    Forward: one GEMM of 2 T H V flop. Under sequence parallelism a gather of hidden in one or two
    pieces, the second in flight during the logits of the first; then all-reduces: SUM of label
    logits [T], MAX [T], SUM of sums [2 to 6, T] fp64 (eager: 1 to 3 rows in the dtype of
    statistics). Saved: the operands, hidden as this rank's own, three [T] vectors, and the cached
    columns [T, cached_v].

    Backward: two GEMMs of 2 T H V flop, a third for the columns that were not cached. Under
    sequence parallelism a gather of hidden, in flight while cached columns make dhidden or while
    dlogits of its first piece are computed; then the sum of dhidden over ranks (scattered, else
    all-reduced), in flight during the last dweight.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, labels, token_weight, call: Call, main_grad: MainGrad | None
    ):
        operands = Operands(hidden, weight, bias, labels, token_weight)
        with computing_on(hidden):
            loss, metrics, saved = forward(call, operands)
        return _remember(ctx, call, main_grad, (*operands, *saved), loss, metrics)

    @staticmethod
    def backward(ctx, *upstream):
        def gradients(upstream: tuple[Tensor | None, ...]) -> Results:
            saved_tensors = ctx.saved_tensors  # read once: checkpoints unpack them
            operands, saved = Operands(*saved_tensors[:5]), Saved(*saved_tensors[5:])
            return backward(
                ctx.call, operands, saved, upstream, ctx.needs_input_grad, ctx.main_grad
            )

        return first_order(gradients, upstream)


class InForwardFunction(torch.autograd.Function):
    """``loss, lse, logprob, entropy, correct`` under the schedule in_forward.

    Forward: three GEMMs of 2 T H V flop, token chunk by token chunk. All of a chunk's exponentials
    are held, those of the first one partly in dweight's own memory (``lending.py``); several chunks
    accumulate dweight in fp32. Under sequence parallelism a gather of hidden in pieces, each in
    flight while the one before is computed, and the sum over ranks of each chunk's dhidden, in
    flight from its last dweight on; the all-reduces of ``chunk_loss`` per chunk. Saved: both
    gradients of the loss (in fp16 of the sum of losses).

    Backward: those times the scalar upstream gradient, at no cost if it is 1. No collective.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, labels, token_weight, call: Call, main_grad: MainGrad | None
    ):
        operands = Operands(hidden, weight, bias, labels, token_weight)
        with computing_on(hidden):
            loss, metrics, saved = in_forward(call, operands, ctx.needs_input_grad[:3])
        return _remember(ctx, call, main_grad, saved, loss, metrics)

    @staticmethod
    def backward(ctx, *upstream):
        def gradients(upstream: tuple[Tensor | None, ...]) -> Results:
            # If backward cannot run again, the saved gradients themselves become the results.
            saved, once = SavedGradients(*ctx.saved_tensors), not _keeps_graph()
            dhidden, dweight, dbias = scaled(
                ctx.call,
                saved,
                upstream,
                reuses_saved=once,
                rounds_dweight=ctx.main_grad is None,  # fp16 may overflow, an fp32 main_grad not
            )
            if ctx.main_grad is not None:
                assert dweight is not None
                dweight = ctx.main_grad.add(dweight)
            return dhidden, dweight, dbias

        return first_order(gradients, upstream)


def _remember(
    ctx: Any,
    call: Call,
    main_grad: MainGrad | None,
    saved: tuple[Tensor | None, ...],
    loss: Tensor,
    metrics: Metrics,
) -> tuple[Tensor | None, ...]:
    """Keep for backward what it needs; return the outputs of a Function."""
    ctx.set_materialize_grads(False)
    ctx.call, ctx.main_grad = call, main_grad
    ctx.save_for_backward(*saved)
    if metrics.correct is not None:
        ctx.mark_non_differentiable(metrics.correct)
    return loss, *metrics


@contextmanager
def computing_on(x: Tensor) -> Iterator[None]:
    """Make x's device current, on which Triton launches, and disable autocast.

    Autocast has already been applied to the operands, and must not change the GEMMs below.
    """
    with torch.cuda.device_of(x):
        if not torch.is_autocast_enabled(x.device.type):  # the common case, cheaper for the host
            yield
            return
        with torch.autocast(x.device.type, enabled=False):
            yield


def first_order(gradients: Any, upstream: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a Function's seven inputs; raise for create_graph=True.

    ``once_differentiable`` is not enough: with it a gradient penalty runs but has no effect.
    """
    if torch.is_grad_enabled():  # what the engine sets for create_graph=True
        raise NotImplementedError(
            "linear_cross_entropy has no second derivative: create_graph=True is not "
            "supported; differentiate flce_dist.reference instead"
        )
    upstream = upstream[:-1]  # correct has no gradient
    some = next((g for g in upstream if g is not None), None)
    if some is None:  # nothing depends on the outputs
        return (None,) * 7
    with computing_on(some):
        return *gradients(upstream), None, None, None, None


def _keeps_graph() -> bool:
    """Whether this backward was asked to retain the graph. PyTorch has no public name for it."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def function_of(call: Call) -> type[torch.autograd.Function]:
    """Return the Function of a call's schedule."""
    is_in_forward = call.plan.schedule == "in_forward"
    return InForwardFunction if is_in_forward else LinearCrossEntropyFunction
