"""The autograd Function of a divergence: that of the loss, with a teacher in forward."""

import weakref
from typing import Any

from torch import Tensor

from flce_dist.core.autograd import LinearCrossEntropyFunction, computing_on, keep
from flce_dist.core.call import Call, Operands
from flce_dist.core.main_grad import captured
from flce_dist.divergence.pair import TeacherOperands


class DivergenceFunction(LinearCrossEntropyFunction):
    """The loss, and metrics, which are not differentiable. The teacher gets no gradient."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, call, models, main_grad, weight_ref):
        """``models`` are the student's operands, which begin with these, and the teacher's."""
        operands, teacher = models
        schedule: Any = call.schedule
        with computing_on(operands.hidden):
            loss, metrics, saved = schedule.forward(call, operands, teacher)
        keep(ctx, call, operands, saved, main_grad, weight_ref)
        ctx.mark_non_differentiable(*metrics)
        return loss, *metrics


def differentiable(
    call: Call, operands: Operands, teacher: TeacherOperands, weight: Tensor
) -> tuple[Tensor, ...]:
    """Return what a call's schedule does, on the graph; ``weight`` is what the caller passed."""
    main_grad = captured(weight, call) if call.accumulates_dweight else None
    models = (operands, teacher)
    graph = operands.hidden, operands.weight, operands.bias
    return DivergenceFunction.apply(*graph, call, models, main_grad, weakref.ref(weight))
