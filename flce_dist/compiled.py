"""The op as torch.compile sees it: two opaque operators with fakes and a gradient.

Calls on several ranks have operators of their own, ``forward_on_ranks`` and ``backward_on_ranks``,
whose order compilers keep: they contain collectives, and graphs of ranks differ in sizes.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from flce_dist import torch_private
from flce_dist.arguments.check_options import check_compiled
from flce_dist.arguments.options import (
    Impl,
    LossOptions,
    Reduction,
    ScheduleOption,
    UnsizedSchedule,
)
from flce_dist.arguments.passed import Arguments
from flce_dist.arguments.prepare import counted_operands, prepare
from flce_dist.arguments.rank_check import check_alike
from flce_dist.core.autograd import check_not_resharded, run_backward, run_forward
from flce_dist.core.call import (
    Call,
    Compilable,
    LossWithMetrics,
    Operands,
    Results,
    Upstream,
    schedule_named,
)

_OPERANDS = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor? token_weight, "
    "Tensor? temperature, Tensor? last_columns"
)
_TENSORS = 7  # of them
# Types in an operator's schema; torch.compile may make some sizes symbolic.
_TYPES: dict[Any, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    float | None: "float?",
    int | None: "int?",
    tuple[int, int] | None: "int[]?",
    Reduction: "str",
    Impl | None: "str?",
    ScheduleOption: "str",
}
_OPTIONS = {field.name: _TYPES[field.type] for field in fields(LossOptions)}
_OPTIONS.update(max_logits_bytes="SymInt?", max_counted="SymInt?")
_SCHEMA = [f"{kind} {name}" for name, kind in _OPTIONS.items()]
_SPEC = ", ".join((*_SCHEMA, "str? group_name", "bool[] needs"))
_UPSTREAM = "Tensor? dloss, Tensor? dlse, Tensor? dlogprob, Tensor? dentropy"
_FORWARD = f"({_OPERANDS}, {_SPEC}) -> Tensor[]"
_BACKWARD = f"({_UPSTREAM}, {_OPERANDS}, Tensor[] saved, {_SPEC}) -> Tensor[]"


def apply(
    arguments: Arguments, needs: list[bool], last_columns: Tensor | None
) -> tuple[Tensor, ...]:
    """Call the operator from compiled code; return the loss and, if asked for, metrics."""
    options = arguments.options
    tp_group = arguments.tp_group
    check_compiled(options, needs)
    outputs = _operator("forward", tp_group)(
        *arguments[: _TENSORS - 1],
        last_columns,
        *values_of(options),
        None if tp_group is None else tp_group.group_name,
        needs,
    )
    return tuple(outputs[: 1 + _metrics(options)])


def values_of(options: LossOptions) -> list[Any]:
    """Return the options as an operator takes them."""
    values = {name: getattr(options, name) for name in _OPTIONS}
    values["schedule"] = _name_of(options.schedule)
    return list(values.values())


def _name_of(schedule: str | UnsizedSchedule) -> str:
    return schedule if isinstance(schedule, str) else schedule.name


def _options_of(values: Sequence[Any]) -> LossOptions:
    """Return the options that an operator was given."""
    named = dict(zip(_OPTIONS, values, strict=True))
    named["schedule"] = schedule_named(named["schedule"]) or named["schedule"]
    if named["vocab_range"] is not None:
        named["vocab_range"] = tuple(named["vocab_range"])
    return LossOptions(**named)


def _operator(name: str, group: object) -> Any:
    return getattr(torch.ops.flce_dist, name if group is None else f"{name}_on_ranks")


def _metrics(options: LossOptions) -> int:
    """Return how many outputs follow the loss."""
    schedule = options.schedule
    results = LossWithMetrics if isinstance(schedule, str) else schedule.results
    return len(results._fields) - 1 if options.with_metrics else 0


def _prepare(inputs: tuple[Any, ...]) -> tuple[Call, Operands]:
    *values, group_name, needs = inputs[_TENSORS:]
    group = None if group_name is None else torch_private.group_named(group_name)
    *tensors, last_columns = inputs[:_TENSORS]
    arguments: Any = (*tensors, _options_of(values), group)
    # Symbolic sizes cannot tell whether dweight's memory is large enough for in_forward.
    return prepare(Arguments(*arguments), needs, is_compiled=True, last_columns=last_columns)


def _present(tensors: Any, like: Tensor) -> list[Tensor]:
    """Operators return tensors: an empty one stands for None."""
    return [like.new_empty(0) if x is None else x for x in tensors]


def _forward(*inputs):
    call, operands = _prepare(inputs)
    columns = 0 if operands.last_columns is None else operands.last_columns.shape[1]
    check_alike("linear_cross_entropy", call, operands, low_rank_columns=columns)
    operands = counted_operands(call, operands)
    needs = inputs[-1]
    shape = inputs[2].shape
    with torch.no_grad():
        loss, metrics, saved = run_forward(call, operands)
    outputs = [x.reshape(shape) if x.dim() else x for x in (loss, *metrics) if x is not None]
    return outputs + (_present(saved, loss) if any(needs) else [])


def _fake_forward(*inputs):
    call, operands = _prepare(inputs)
    hidden = inputs[0]
    of_tokens = inputs[2].shape
    scalar = ()

    def new(shape, dtype=call.stats_dtype):
        return hidden.new_empty(shape, dtype=dtype)

    outputs = [new(of_tokens if call.options.reduction == "none" else scalar)]
    if call.options.with_metrics:
        outputs += [new(of_tokens), new(of_tokens), new(of_tokens), new(of_tokens, torch.bool)]
        outputs += [new(scalar) for _ in range(_metrics(call.options) - 4)]  # of the schedule
    if not any(call.needs):
        return outputs
    schedule = call.schedule
    assert isinstance(schedule, Compilable)
    return outputs + _present(schedule.saved_like(call, operands), outputs[0])


def _backward(dloss, dlse, dlogprob, dentropy, *inputs):
    inputs, saved, spec = inputs[:_TENSORS], inputs[_TENSORS], inputs[_TENSORS + 1 :]
    hidden, weight, labels, bias = inputs[:4]
    call, operands = _prepare((*inputs, *spec))
    kept = counted_operands(call, operands) if call.schedule.keeps_operands else None
    needs = spec[-1]
    if needs[1]:
        check_not_resharded(weight)
    of_results = (dloss, dlse, dlogprob, dentropy)
    upstream = Upstream(*(g if g is None or g.dim() == 0 else g.reshape(-1) for g in of_results))
    gradients: Results = (None, None, None)
    if labels.numel():  # without tokens, statistics are as empty as those that stand for None
        tensors = tuple(x if x.numel() else None for x in saved)
        with torch.no_grad():  # an operator must not return its inputs
            gradients = run_backward(call, kept, tensors, upstream, None, is_last=False)
    # A needed gradient that is None here is one without elements, or without tokens: zeros.
    return [
        hidden.new_empty(0) if not need else torch.zeros_like(x) if g is None else g.view(x.shape)
        for g, x, need in zip(gradients, (hidden, operands.trained, bias), needs, strict=True)
    ]


def _fake_backward(dloss, dlse, dlogprob, dentropy, *inputs):
    hidden, weight, _, bias, *_, last_columns = inputs[:_TENSORS]
    trained = weight if last_columns is None else last_columns
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else hidden.new_empty(0)
        for x, need in zip((hidden, trained, bias), inputs[-1], strict=True)
    ]


def _setup_context(ctx, inputs, output):
    operands = inputs[:_TENSORS]
    ctx.spec = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)
    saved = output[1 + _metrics(_options_of(ctx.spec[:-2])) :]
    ctx.save_for_backward(*operands, *saved)


def _differentiate(ctx, grads):
    operands = ctx.saved_tensors[:_TENSORS]
    saved = list(ctx.saved_tensors[_TENSORS:])
    needs = ctx.spec[-1]
    with_metrics = _options_of(ctx.spec[:-2]).with_metrics
    upstream = Upstream(*grads[:4]) if with_metrics else Upstream(grads[0])
    if all(g is None for g in upstream):
        return (None,) * (_TENSORS + len(ctx.spec))
    backward = _operator("backward", ctx.spec[-2])
    gradients = backward(*upstream, *operands, saved, *ctx.spec)
    dhidden, dweight, dbias = (g if n else None for g, n in zip(gradients, needs, strict=True))
    of_weight, of_columns = (dweight, None) if operands[-1] is None else (None, dweight)
    return dhidden, of_weight, None, dbias, None, None, of_columns, *(None for _ in ctx.spec)


def _register(suffix: str) -> None:
    forward = torch.library.custom_op(
        f"flce_dist::forward{suffix}", _forward, mutates_args=(), schema=_FORWARD
    )
    forward.register_fake(_fake_forward)
    forward.register_autograd(_differentiate, setup_context=_setup_context)
    backward = torch.library.custom_op(
        f"flce_dist::backward{suffix}", _backward, mutates_args=(), schema=_BACKWARD
    )
    backward.register_fake(_fake_backward)


_register("")
_register("_on_ranks")
for _name in ("forward", "backward"):
    torch_private.keep_order(_operator(_name, "of ranks").default)
