"""The autograd Function: what is saved, and when a schedule runs forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flce_dist.op.call import Call, Metrics, Operands, Results, Saved, Sink, Upstream


class LinearCrossEntropyFunction(torch.autograd.Function):
    """``loss`` and ``Metrics`` of a call.

    GEMMs, collectives and saved tensors are the schedule's; each class of them says which.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, token_weight, call: Call, sink: Sink):
        operands = Operands(hidden, weight, bias, labels, token_weight)
        loss, metrics, saved = run_forward(call, operands)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.sink, ctx.saved = call, sink, len(saved)
        ctx.save_for_backward(*saved, *(operands if call.schedule.keeps_operands else ()))
        ctx.mark_non_differentiable(*(x for x in metrics[3:] if x is not None))
        return loss, *metrics

    @staticmethod
    def backward(ctx, *upstream):
        # ``once_differentiable`` is not enough: with it a gradient penalty runs without effect.
        if torch.is_grad_enabled():  # what the engine sets for create_graph=True
            raise NotImplementedError(
                "linear_cross_entropy has no second derivative: create_graph=True is not "
                "supported; differentiate flce_dist.reference instead"
            )
        gradients: Results = (None, None, None)
        of_outputs = Upstream(*upstream[:4])
        if any(g is not None for g in of_outputs):
            tensors = ctx.saved_tensors
            saved, operands = tensors[: ctx.saved], tensors[ctx.saved :]
            gradients = run_backward(
                ctx.call, Operands(*operands) if operands else None, saved, of_outputs, ctx.sink,
                # What retain_graph says, for which PyTorch has no public name.
                is_last=not torch._C._autograd._get_current_graph_task_keep_graph(),
            )  # fmt: skip
        return *gradients, None, None, None, None


def run_forward(call: Call, operands: Operands) -> tuple[Tensor, Metrics, Saved]:
    """Return what the call's schedule returns, on the operands' device."""
    with _computing_on(operands.hidden):
        return call.schedule.forward(call, operands)


def run_backward(
    call: Call,
    operands: Operands | None,
    saved: Saved,
    upstream: Upstream,
    sink: Sink,
    *,
    is_last: bool,
) -> Results:
    """Return the gradients of hidden, weight and bias, on the upstream gradients' device."""
    with _computing_on(next(g for g in upstream if g is not None)):
        return call.schedule.backward(call, operands, saved, upstream, sink, is_last=is_last)


@contextmanager
def _computing_on(x: Tensor) -> Iterator[None]:
    """Make x's device current, on which Triton launches, and disable autocast.

    Autocast has already been applied to the operands, and must not change the GEMMs below.
    """
    with torch.cuda.device_of(x):
        if not torch.is_autocast_enabled(x.device.type):  # the common case, cheaper for the host
            yield
            return
        with torch.autocast(x.device.type, enabled=False):
            yield
