"""The autograd Function: what is saved, and when a schedule runs forward and backward."""

import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flce_dist.arguments.ways_out import IN_FORWARD_OF_FSDP
from flce_dist.core.call import Call, Operands, Upstream, as_stored
from flce_dist.core.gradients import new_dweight
from flce_dist.core.interface import Backward, Outputs, Results, Saved
from flce_dist.core.main_grad import MainGrad, captured
from flce_dist.torch_private.engine import is_batched, is_returned, is_wanted, keeps_graph
from flce_dist.torch_private.modes import FakeTensor, is_jit_tracing, recorder, transforms

_UNCHANGED = nullcontext()  # torch.cuda.device takes the host longer


class LinearCrossEntropyFunction(torch.autograd.Function):
    """``loss`` and ``Metrics`` of a call.

    GEMMs, collectives and saved tensors are the schedule's; each class of them says which.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, call, operands, main_grad, weight_ref):
        """Autograd sees the first three, which are those of ``operands``, weight as ``trained``.

        Others as arguments of their own would cost host time. ``weight_ref`` refers to the caller's
        weight, perhaps a DTensor or of another dtype.
        """
        loss, metrics, saved = run_forward(call, operands)
        keep(ctx, call, operands, saved, main_grad, weight_ref)
        if not any(x is not None for x in metrics):
            return (loss,)
        without_gradient = metrics[3:]  # correct, and scalars of the schedule's own
        ctx.mark_non_differentiable(*(x for x in without_gradient if x is not None))
        return loss, *metrics

    @staticmethod
    def backward(ctx, *upstream):
        # ``once_differentiable`` is not enough: with it a gradient penalty runs without effect.
        if torch.is_grad_enabled():  # what the engine sets for create_graph=True
            raise NotImplementedError(
                "flce_dist has no second derivative: create_graph=True is not "
                "supported; differentiate flce_dist.reference instead"
            )
        if transforms() or any(g is not None and is_batched(g) for g in upstream):
            raise NotImplementedError(
                "flce_dist has no batched backward (is_grads_batched=True, "
                "jacobian(..., vectorize=True)): call backward once for each upstream gradient"
            )
        call = ctx.call
        if call.needs.weight:
            check_not_resharded(ctx.weight_ref())
        # needs.weight is of forward, the same on all ranks, which so exchange the same; a rank's
        # torch.autograd.grad(loss, hidden) may not want the weight's gradient.
        wants_dweight = call.needs.weight
        if call.accumulates_dweight:
            wants_dweight = is_wanted(ctx.next_functions[1][0])
        gradients: Results = (None, None, None)
        of_outputs = Upstream(*upstream[:4])
        if any(g is not None for g in of_outputs):
            tensors = ctx.saved_tensors
            saved = tensors[: ctx.number_saved]
            operands = tensors[ctx.number_saved :]
            gradients = run_backward(
                call,
                Operands(*operands) if operands else None,
                saved,
                of_outputs,
                ctx.main_grad,
                wants_dweight=wants_dweight,
                is_last=not keeps_graph(),
            )
            if call.accumulates_dweight and is_returned(ctx.next_functions[1][0]):
                dhidden, _, dbias = gradients
                gradients = dhidden, ctx.main_grad.zeros(), dbias
        return *gradients, None, None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "flce_dist has no forward-mode derivative (torch.autograd.forward_ad, "
            'jacobian(..., strategy="forward-mode")): use backward or torch.autograd.grad, or '
            "differentiate flce_dist.reference instead"
        )


def keep(
    ctx: Any,
    call: Call,
    operands: Operands,
    saved: Saved,
    main_grad: MainGrad | None,
    weight_ref: weakref.ref[Tensor],
) -> None:
    """Keep for backward what forward has saved, and the operands if the schedule reads them."""
    ctx.set_materialize_grads(False)
    ctx.call = call
    ctx.main_grad = main_grad
    ctx.weight_ref = weight_ref
    ctx.number_saved = len(saved)
    ctx.save_for_backward(*saved, *(operands if call.schedule.keeps_operands else ()))


def differentiable(call: Call, operands: Operands, weight: Tensor) -> tuple[Tensor, ...]:
    """Return what a call's schedule does, on the graph; ``weight`` is what the caller passed."""
    main_grad = captured(weight, call) if call.accumulates_dweight else None
    graph = operands.hidden, operands.trained, operands.bias
    return LinearCrossEntropyFunction.apply(*graph, call, operands, main_grad, weakref.ref(weight))


def refuse_tracing(name: str, hidden: Any) -> None:
    """Refuse torch.func, tracers, and tensors without data, for the function of this name.

    Tensors are fake in compiled code, too, which calls operators that have fakes.
    """
    if not torch.compiler.is_compiling():
        if isinstance(hidden, FakeTensor):
            raise ValueError(
                f"hidden must hold data, got a FakeTensor: call {name} outside FakeTensorMode; "
                "flce_dist.plan tells the sizes of the loss there, and torch.compile and "
                "torch.export trace it"
            )
        if recorder() is not None or is_jit_tracing():
            # What kernels write is not recorded.
            raise NotImplementedError(
                f"{name} is not recorded by make_fx, torch.func.linearize and torch.jit.trace: "
                "torch.compile and torch.export trace the loss, and these flce_dist.reference"
            )
    if transforms():
        raise NotImplementedError(
            f"{name} does not support the transforms of torch.func (grad, vmap, "
            "jacrev, ...): use backward or torch.autograd.grad, and one call for all tokens, "
            "hidden [..., H], instead of vmap; flce_dist.reference supports them"
        )


def check_not_resharded(weight: Tensor | None) -> None:
    """Check that the caller's weight, if it still exists, has its memory.

    FSDP2's reshard frees it. What in_forward has saved would become the gradient of a parameter
    that FSDP2 no longer looks at; other schedules would read freed memory.
    """
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if local is not None and local.numel() and not local.untyped_storage().size():
        raise ValueError(
            "weight must not be resharded between forward and backward, since the sharded "
            f"parameter would get no gradient, got freed memory; {IN_FORWARD_OF_FSDP}, and again "
            "for backward"
        )


def run_forward(call: Call, operands: Operands) -> tuple[Tensor, Outputs, Saved]:
    """Return what the call's schedule returns, on the operands' device."""
    with computing_on(operands.hidden):
        return call.schedule.forward(call, operands)


def run_backward(
    call: Call,
    operands: Operands | None,
    saved: Saved,
    upstream: Upstream,
    main_grad: MainGrad | None,
    *,
    wants_dweight: bool,
    is_last: bool,
) -> Results:
    """Return the gradients of hidden, weight and bias, on the upstream gradients' device.

    With ``main_grad`` dweight is added to that. A rank that does not want dweight makes the same
    collectives without it.
    """
    upstream = Upstream(*map(as_stored, upstream))
    with computing_on(next(g for g in upstream if g is not None)):
        accumulator = None
        if operands is not None and wants_dweight:
            if main_grad is None:
                accumulator = new_dweight(operands.trained, call.dtype)
            else:
                accumulator = main_grad.opened()
        dhidden, dweight, dbias = call.schedule.backward(
            Backward(call, operands, saved, upstream, accumulator, is_last)
        )
        if not wants_dweight:
            return dhidden, None, dbias
        if dweight is not None and main_grad is not None:
            dweight = main_grad.added(dweight) if accumulator is None else main_grad.closed()
        elif dweight is not None and accumulator is None:
            dweight = dweight.to(call.dtype)
        return dhidden, dweight, dbias


def computing_on(x: Tensor) -> AbstractContextManager[Any]:
    """Make x's device current, on which Triton launches, and disable autocast.

    Autocast has already been applied to the operands, and must not change the GEMMs below.
    """
    current = torch.cuda.current_device() if x.is_cuda else -1
    if x.get_device() == current and not torch.is_autocast_enabled(x.device.type):
        return _UNCHANGED
    contexts = ExitStack()
    contexts.enter_context(torch.cuda.device_of(x))
    contexts.enter_context(torch.autocast(x.device.type, enabled=False))
    return contexts
