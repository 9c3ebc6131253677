"""The op as torch.compile sees it: two opaque operators with fakes and a gradient.

Calls on several ranks have operators of their own, ``forward_on_ranks`` and ``backward_on_ranks``,
whose order compilers keep: they contain collectives, and graphs of ranks differ in sizes.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from flce_dist.core.call import Call, Needs, Operands, Upstream
from flce_dist.core.interface import Compilable, LossWithMetrics, Results, schedule_named
from flce_dist.torch_private.compiling import is_exporting, keep_order
from flce_dist.torch_private.groups import group_named

_OPERANDS = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor? token_weight, "
    "Tensor? temperature, Tensor? last_columns"
)
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
# Fields have types, not their names, since options.py does not postpone annotations.
_OPTIONS = {field.name: _TYPES[field.type] for field in fields(LossOptions)}
_OPTIONS.update(max_logits_bytes="SymInt?", max_counted="SymInt?")
_SCHEMA = [f"{kind} {name}" for name, kind in _OPTIONS.items()]
_SPEC = ", ".join((*_SCHEMA, "str? group_name", "bool[] needs"))
_UPSTREAM = "Tensor? dloss, Tensor? dlse, Tensor? dlogprob, Tensor? dentropy"
_FORWARD = f"({_OPERANDS}, {_SPEC}) -> Tensor[]"
_BACKWARD = f"({_UPSTREAM}, {_OPERANDS}, Tensor[] saved, {_SPEC}) -> Tensor[]"


class _Tensors(NamedTuple):
    """The operands, in the schema's order."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    token_weight: Tensor | None
    temperature: Tensor | None
    last_columns: Tensor | None

    @property
    def trained(self) -> Tensor:
        """The weight, or those of its columns that alone are trained."""
        return self.weight if self.last_columns is None else self.last_columns


_TENSORS = len(_Tensors._fields)


class _Spec(NamedTuple):
    """What an operator takes behind tensors."""

    options: LossOptions
    group_name: str | None
    needs: Needs

    @staticmethod
    def of(inputs: Sequence[Any]) -> "_Spec":
        """Return the spec that an operator was given."""
        *values, group_name, needs = inputs
        return _Spec(_options_of(values), group_name, Needs(*needs))


def apply(arguments: Arguments, needs: Needs, last_columns: Tensor | None) -> tuple[Tensor, ...]:
    """Call the operator from compiled code; return the loss and, if asked for, metrics."""
    options = arguments.options
    tp_group = arguments.tp_group
    check_compiled(options, needs)
    if is_exporting():
        options = _exported(options, needs)
    outputs = _operator("forward", on_ranks=tp_group is not None)(
        *arguments[: _TENSORS - 1],
        last_columns,
        *values_of(options),
        None if tp_group is None else tp_group.group_name,
        list(needs),
    )
    return tuple(outputs[: 1 + _number_of_metrics(options)])


def _exported(options: LossOptions, needs: Needs) -> LossOptions:
    """Return the options as a graph of torch.export has them: one graph for any number of tokens.

    What ``auto`` caches depends on how many the budget holds, so its graph would be for these, and
    torch.export refuses a dimension that its caller has not bounded to them.
    """
    caches = needs.weight or needs.bias or (needs.hidden and options.with_metrics)
    if options.schedule == "auto" and caches:
        return replace(options, schedule="recompute")
    return options


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


def _operator(name: str, *, on_ranks: bool) -> Any:
    return getattr(torch.ops.flce_dist, f"{name}_on_ranks" if on_ranks else name)


def _number_of_metrics(options: LossOptions) -> int:
    """Return how many outputs follow the loss."""
    schedule = options.schedule
    results = LossWithMetrics if isinstance(schedule, str) else schedule.results
    return len(results._fields) - 1 if options.with_metrics else 0


def _prepare(tensors: _Tensors, spec: _Spec) -> tuple[Call, Operands]:
    *of_call, last_columns = tensors
    group = None if spec.group_name is None else group_named(spec.group_name)
    arguments: Any = (*of_call, spec.options, group)
    # Symbolic sizes cannot tell whether dweight's memory is large enough for in_forward.
    return prepare(Arguments(*arguments), spec.needs, is_compiled=True, last_columns=last_columns)


def _without_none(tensors: Any, like: Tensor) -> list[Tensor]:
    """Return the tensors as operators must, which return no None: an empty one stands for it."""
    return [like.new_empty(0) if x is None else x for x in tensors]


def _forward(*inputs: Any) -> list[Tensor]:
    tensors = _Tensors(*inputs[:_TENSORS])
    spec = _Spec.of(inputs[_TENSORS:])
    call, operands = _prepare(tensors, spec)
    columns = 0 if tensors.last_columns is None else tensors.last_columns.shape[1]
    # Of data ranks, too: ``gather_alike`` has compared what decides the gathers alone.
    function = f"linear_cross_entropy{'_with_metrics' if call.options.with_metrics else ''}"
    check_alike(function, call, operands, low_rank_columns=columns)
    operands = counted_operands(call, operands)
    shape = tensors.labels.shape
    with torch.no_grad():
        loss, metrics, saved = run_forward(call, operands)
    outputs = [x.reshape(shape) if x.dim() else x for x in (loss, *metrics) if x is not None]
    return outputs + (_without_none(saved, loss) if any(spec.needs) else [])


def _fake_forward(*inputs: Any) -> list[Tensor]:
    tensors = _Tensors(*inputs[:_TENSORS])
    call, operands = _prepare(tensors, _Spec.of(inputs[_TENSORS:]))
    of_tokens = tensors.labels.shape
    scalar = torch.Size()

    def new(shape: torch.Size, dtype: torch.dtype = call.stats_dtype) -> Tensor:
        return tensors.hidden.new_empty(shape, dtype=dtype)

    outputs = [new(of_tokens if call.options.reduction == "none" else scalar)]
    if call.options.with_metrics:
        outputs += [new(of_tokens), new(of_tokens), new(of_tokens), new(of_tokens, torch.bool)]
        of_schedule = 1 + _number_of_metrics(call.options) - len(outputs)
        outputs += [new(scalar) for _ in range(of_schedule)]
    if not any(call.needs):
        return outputs
    schedule = call.schedule
    assert isinstance(schedule, Compilable)
    return outputs + _without_none(schedule.saved_like(call, operands), outputs[0])


def _backward(dloss: Any, dlse: Any, dlogprob: Any, dentropy: Any, *inputs: Any) -> list[Tensor]:
    tensors = _Tensors(*inputs[:_TENSORS])
    saved = inputs[_TENSORS]
    spec = _Spec.of(inputs[_TENSORS + 1 :])
    call, operands = _prepare(tensors, spec)
    kept = counted_operands(call, operands) if call.schedule.keeps_operands else None
    if call.needs.weight:
        check_not_resharded(tensors.weight)
    of_results = (dloss, dlse, dlogprob, dentropy)
    upstream = Upstream(*(g if g is None or g.dim() == 0 else g.reshape(-1) for g in of_results))
    gradients: Results = (None, None, None)
    # Without tokens gradients are zeros, and statistics are as empty as what stands for None.
    if tensors.labels.numel():
        present = tuple(x if x.numel() else None for x in saved)
        with torch.no_grad():  # an operator must not return its inputs
            gradients = run_backward(
                call, kept, present, upstream, None, wants_dweight=call.needs.weight, is_last=False
            )

    def result(gradient: Tensor | None, x: Tensor | None, is_needed: bool) -> Tensor:
        if x is None or not is_needed:
            return _nothing(tensors)
        # None here is a gradient without elements, or without tokens.
        return torch.zeros_like(x) if gradient is None else gradient.view(x.shape)

    wanted = (tensors.hidden, tensors.trained, tensors.bias)
    return [result(*of_one) for of_one in zip(gradients, wanted, spec.needs, strict=True)]


def _fake_backward(
    dloss: Any, dlse: Any, dlogprob: Any, dentropy: Any, *inputs: Any
) -> list[Tensor]:
    tensors = _Tensors(*inputs[:_TENSORS])
    needs = inputs[-1]
    wanted = (tensors.hidden, tensors.trained, tensors.bias)
    return [
        _nothing(tensors)
        if x is None or not need
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, need in zip(wanted, needs, strict=True)
    ]


def _nothing(tensors: _Tensors) -> Tensor:
    """Return what stands for a gradient that is not needed."""
    return tensors.hidden.new_empty(0)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.inputs_behind = inputs[_TENSORS:]  # as an operator takes them
    ctx.spec = _Spec.of(ctx.inputs_behind)
    ctx.set_materialize_grads(False)
    saved = output[1 + _number_of_metrics(ctx.spec.options) :]
    ctx.save_for_backward(*inputs[:_TENSORS], *saved)


def _differentiate(ctx: Any, grads: Any) -> tuple[Tensor | None, ...]:
    tensors = _Tensors(*ctx.saved_tensors[:_TENSORS])
    saved = list(ctx.saved_tensors[_TENSORS:])
    spec: _Spec = ctx.spec
    upstream = Upstream(*grads[:4]) if spec.options.with_metrics else Upstream(grads[0])
    of_spec = (None,) * len(ctx.inputs_behind)
    if all(g is None for g in upstream):
        return (None,) * _TENSORS + of_spec
    backward = _operator("backward", on_ranks=spec.group_name is not None)
    gradients = backward(*upstream, *tensors, saved, *ctx.inputs_behind)
    needed = zip(gradients, spec.needs, strict=True)
    dhidden, dweight, dbias = (g if need else None for g, need in needed)
    of_columns = None
    if tensors.last_columns is not None:
        of_columns = dweight
        dweight = None
    return dhidden, dweight, None, dbias, None, None, of_columns, *of_spec


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
    keep_order(_operator(_name, on_ranks=True).default)
