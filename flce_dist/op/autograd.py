"""The autograd Function: what is saved, and which schedule computes forward and backward.

T = tokens on the tensor-parallel group, V = vocabulary rows here, H = hidden size, P = ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flce_dist.op import filtered
from flce_dist.op.backward import Results, backward
from flce_dist.op.forward import Metrics, Saved, forward
from flce_dist.op.in_forward import SavedGradients, in_forward, scaled
from flce_dist.op.main_grad import MainGrad
from flce_dist.op.prepare import Call, Operands


class LinearCrossEntropyFunction(torch.autograd.Function):
    """``loss`` and ``Metrics`` of a call.

    recompute and cached. Forward: one GEMM of 2 T H V flop. Under sequence parallelism a gather of
    hidden in one or two pieces, the second in flight during the logits of the first; then
    all-reduces: SUM of label logits [T], MAX [T], SUM of sums [2 to 6, T] fp64 (eager: 1 to 3 rows
    in the dtype of statistics). Saved: the operands, hidden as this rank's own, three [T] vectors,
    and the cached columns [T, cached_v].
    Backward: two GEMMs of 2 T H V flop, a third for the columns that were not cached. Under
    sequence parallelism a gather of hidden, in flight while cached columns make dhidden or while
    dlogits of its first piece are computed; then the sum of dhidden over ranks (scattered, else
    all-reduced), in flight during the last dweight.

    filtered. Forward: that of recompute, and one pass over the maxima and sums of tiles
    [2, V / 256, T]. Saved in addition: which tiles are kept [T / 128, V / 256], and each token's
    mass in the others [V / 256, T]. With metrics an all-reduce of three numbers.
    Backward: of three GEMMs of 2 T H V flop the tiles that are kept, and rank-one terms by two
    GEMMs of 1 / 256 of that. Collectives are those of recompute.

    in_forward. Forward: three GEMMs of 2 T H V flop, token chunk by token chunk. All of a chunk's
    exponentials are held, those of the first one partly in dweight's own memory (``lending.py``);
    several chunks accumulate dweight in fp32. Under sequence parallelism a gather of hidden in
    pieces, each in flight while the one before is computed, and the sum over ranks of each chunk's
    dhidden, in flight from its last dweight on; the all-reduces of ``chunk_loss`` per chunk. Saved:
    both gradients of the loss (in fp16 of the sum of losses).
    Backward: those times the scalar upstream gradient, at no cost if it is 1. No collective.
    """

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, labels, token_weight, call: Call, main_grad: MainGrad | None
    ):
        operands = Operands(hidden, weight, bias, labels, token_weight)
        loss, metrics, saved = run_forward(call, operands, ctx.needs_input_grad[:3])
        ctx.set_materialize_grads(False)
        ctx.call, ctx.main_grad = call, main_grad
        ctx.save_for_backward(*saved, *(operands if isinstance(saved, Saved) else ()))
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
        upstream = upstream[:4]  # of the loss, lse, logprob and entropy
        gradients: Results = (None, None, None)
        if any(g is not None for g in upstream):
            # If backward cannot run again, gradients saved by in_forward become the results.
            gradients = run_backward(
                ctx.call, ctx.saved_tensors, upstream, ctx.needs_input_grad, ctx.main_grad,
                # What retain_graph says, for which PyTorch has no public name.
                reuses_saved=not torch._C._autograd._get_current_graph_task_keep_graph(),
            )  # fmt: skip
        return *gradients, None, None, None, None


def run_forward(
    call: Call, operands: Operands, needs: Sequence[bool]
) -> tuple[Tensor, Metrics, Saved | SavedGradients]:
    """Return the loss, the metrics and what backward needs, under the call's schedule."""
    with computing_on(operands.hidden):
        if call.plan.schedule == "in_forward":
            return in_forward(call, operands, needs)
        return forward(call, operands)


def run_backward(
    call: Call,
    tensors: Sequence[Any],
    upstream: Sequence[Tensor | None],
    needs: Sequence[bool],
    main_grad: MainGrad | None = None,
    *,
    reuses_saved: bool,
) -> Results:
    """Return the gradients of hidden, weight and bias, under the call's schedule.

    ``tensors`` are what ``run_forward`` saved, then the operands, which in_forward does not need
    again. At least one of the ``upstream`` gradients is not None. ``main_grad`` and
    ``reuses_saved`` are as in ``backward`` and ``scaled``.
    """
    # Kernels read memory, which holds a negated view without the sign.
    upstream = [g.resolve_neg() if g is not None and g.is_neg() else g for g in upstream]
    with computing_on(next(g for g in upstream if g is not None)):
        if call.plan.schedule != "in_forward":
            n = len(Saved._fields)
            saved, operands = Saved(*tensors[:n]), Operands(*tensors[n:])
            run = filtered.backward if call.plan.schedule == "filtered" else backward
            return run(call, operands, saved, upstream, needs, main_grad)
        dhidden, dweight, dbias = scaled(
            call,
            SavedGradients(*tensors[:4]),
            upstream,
            reuses_saved=reuses_saved,
            rounds_dweight=main_grad is None,  # fp16 may overflow, an fp32 main_grad not
        )
        if main_grad is not None:
            assert dweight is not None
            dweight = main_grad.add(dweight)
        return dhidden, dweight, dbias


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
