"""From arguments of student and teacher to a planned call.  P ranks, V rows of a shard."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flce_dist.arguments import values
from flce_dist.arguments.check_options import check_range
from flce_dist.arguments.check_tensors import (
    FLOATS,
    LABELS,
    OF_GRADIENTS,
    check_bias,
    check_shapes,
    check_tensor,
)
from flce_dist.arguments.dtensor import check_plain, localized
from flce_dist.arguments.options import LossOptions
from flce_dist.arguments.passed import (
    Arguments,
    in_callers_order,
    may_have_dtensors,
    settled,
    shape_of_tokens,
    tempered,
)
from flce_dist.arguments.prepare import check_temperatures, counted_operands, prepare
from flce_dist.arguments.rank_check import check_alike, refusals_told
from flce_dist.core.call import NO_GRADIENT, Call, Operands
from flce_dist.divergence.choose import chosen_schedule
from flce_dist.divergence.function import differentiable
from flce_dist.divergence.pair import Teacher, TeacherOperands
from flce_dist.kernels.divergence.formulas import Measure
from flce_dist.parallel import collectives
from flce_dist.parallel.counted import at_places
from flce_dist.parallel.vocab import largest_shard
from flce_dist.torch_private.devices import assert_soon

_IGNORED = -100  # label of ignored tokens from here on; that of others is 0
_NAMED_ALIKE = re.compile(r"\b(hidden|weight|bias|temperature|vocab_range|logit_scale|softcap)\b")
"""Arguments that a teacher has, too, by the names of the student's."""


class TeacherArguments(NamedTuple):
    """What the caller passed of the teacher."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float | Tensor
    rows: Tensor | None
    options: dict[str, Any]  # of ``checked_teacher``


def checked_teacher(
    *, teacher_softcap: Any, teacher_logit_scale: Any, teacher_vocab_range: Any
) -> dict[str, Any]:
    """Check the teacher's options; return them by the names of the student's."""
    return {
        "softcap": values.positive("teacher_softcap", teacher_softcap, optional=True),
        "logit_scale": values.not_zero("teacher_logit_scale", teacher_logit_scale),
        "vocab_range": values.rows("teacher_vocab_range", teacher_vocab_range),
    }


def diverged(
    function: str, student: Arguments, teacher: TeacherArguments, measure: Measure
) -> tuple[Tensor, ...]:
    """Return the loss and any metrics in the shape of the caller's tokens."""
    weight = student.weight  # as the caller passed it
    with refusals_told(function, student.tp_group, student.hidden):
        if may_have_dtensors(student):
            student = localized(student)
        student = _labelled(student)
        student = student._replace(temperature=tempered(student.temperature, student.labels))
        ordered, needs = settled(student)
        call, operands = prepare(ordered, needs)
        with torch.no_grad():
            described, teachers = _prepared(teacher, student, call, operands)
        call = replace(call, schedule=_schedule(measure, described, call, operands))
    check_alike(function, call, operands, teacher_temperature=teachers.inverse_temperature)
    described.check_aligned()
    operands = counted_operands(call, operands)
    teachers = _counted(teachers, operands)
    outputs = differentiable(call, operands, teachers, weight)
    shape = ordered.labels.shape
    results = (x.view(shape) if x.dim() else x for x in outputs)
    return in_callers_order(results, ordered, student)


def _schedule(measure: Measure, teacher: Teacher, call: Call, operands: Operands) -> Any:
    options = call.options
    V = largest_shard(
        len(operands.weight),
        vocab_size=call.vocab_size,
        is_uneven=options.vocab_range is not None,
        P=collectives.group_size(call.tp_group),
    )
    return chosen_schedule(
        measure,
        teacher,
        T=call.T,
        V=V,
        dtype=call.dtype,
        asked=str(options.schedule),
        is_reduced=options.reduction != "none",
        needs_gradient=any(call.needs),
        max_logits_bytes=options.max_logits_bytes,
    )


def _counted(teachers: TeacherOperands, student: Operands) -> TeacherOperands:
    """Return the operands for the tokens of the student's, and check both models' temperatures."""
    counted = student.labels != _IGNORED
    inverse = teachers.inverse_temperature
    if inverse is not None:
        inverse = at_places(inverse, student.places).where(counted, 1.0)
    check_temperatures(student.inverse_temperature, counted)
    check_temperatures(inverse, counted, "teacher_temperature")
    return teachers._replace(inverse_temperature=inverse)


def _labelled(student: Arguments) -> Arguments:
    """Return the arguments with labels that are 0, or ``_IGNORED`` where tokens are ignored."""
    hidden = student.hidden
    labels = student.labels
    options = student.options
    if labels is None:
        tokens = shape_of_tokens(hidden, options, student.tp_group)
        labels = torch.zeros(tokens, dtype=torch.int64, device=hidden.device)
    else:
        check_tensor("labels", labels, LABELS, hidden)
        labels = torch.where(labels == options.ignore_index, _IGNORED, 0)
    return student._replace(labels=labels, options=replace(options, ignore_index=_IGNORED))


def _prepared(
    teacher: TeacherArguments, student: Arguments, call: Call, operands: Operands
) -> tuple[Teacher, TeacherOperands]:
    """Return what is known of the teacher, and its tensors, of all tokens of the caller."""
    options = student.options
    tp_group = student.tp_group
    impl: Any = call.impl
    own = LossOptions(
        reduction="sum",
        softcap=teacher.options["softcap"],
        logit_scale=teacher.options["logit_scale"],
        vocab_range=_vocab_range(teacher, options),
        sequence_parallel=options.sequence_parallel,
        sequence_dim=options.sequence_dim,
        max_counted=options.max_counted,
        skip_ignored=options.skip_ignored,
        impl=impl,
    )
    hidden, weight, bias, temperature, rows, _ = teacher
    arguments = Arguments(hidden, weight, student.labels, bias, None, temperature, own, tp_group)
    check_tensor("teacher_hidden", hidden, FLOATS, student.hidden)
    if may_have_dtensors(arguments):
        with _named_as_the_teachers():
            arguments = localized(arguments)
    check_tensor("teacher_weight", arguments.weight, FLOATS, student.hidden)
    with _named_as_the_teachers():
        check_shapes(arguments.hidden, arguments.weight)
        check_bias(arguments.bias, arguments.weight, arguments.hidden)
    _check_sizes(arguments, student, call, rows)
    if rows is not None:
        arguments = _with_rows(arguments, rows, student)
    with _named_as_the_teachers():
        own = replace(arguments.options, vocab_size=call.vocab_size)
        of_tokens = tempered(arguments.temperature, student.labels)
        ordered, _ = settled(arguments._replace(temperature=of_tokens, options=own))
        teachers_call, flat = prepare(ordered, NO_GRADIENT)
    teachers = TeacherOperands(flat.hidden, flat.weight, flat.bias, flat.inverse_temperature)
    described = Teacher(
        teachers_call,
        _facts(teachers_call, teachers),
        _are_aligned(call, len(operands.weight), teachers_call, len(teachers.weight)),
    )
    return described, teachers


def _vocab_range(teacher: TeacherArguments, of_student: LossOptions) -> tuple[int, int] | None:
    """Return the caller's range of teacher_weight; None if its placement or its rank says it."""
    if isinstance(teacher.weight, DTensor):
        return None
    own: tuple[int, int] | None = teacher.options["vocab_range"]
    if own is None and teacher.rows is None:  # with rows the student's ids are numbered anew
        return of_student.vocab_range
    return own


@contextmanager
def _named_as_the_teachers() -> Iterator[None]:
    """Let complaints about the teacher's arguments call them by their names."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        words = str(error).removesuffix(OF_GRADIENTS)  # a teacher's tensors get none
        raise type(error)(_NAMED_ALIKE.sub(r"teacher_\1", words)) from None


def _check_sizes(arguments: Arguments, student: Arguments, call: Call, rows: Tensor | None) -> None:
    tokens = student.hidden.shape[:-1]
    if arguments.hidden.shape[:-1] != tokens:
        raise ValueError(
            f"teacher_hidden must be {values.shape(*tokens, 'H')} of the tokens of hidden, "
            f"got {tuple(arguments.hidden.shape)}"
        )
    is_ranged = arguments.options.vocab_range is not None
    vocab_size = call.options.vocab_size
    V = len(student.weight)
    V_of_teacher = len(arguments.weight)
    got = tuple(arguments.weight.shape)
    if rows is not None or is_ranged:
        return
    if vocab_size is None and V_of_teacher != V:
        raise ValueError(
            f"teacher_weight must have the {V} rows of weight, got {got}: pass vocab_size if the "
            "first ids are the same, else teacher_rows, the teacher's row of each id"
        )
    P = collectives.group_size(student.tp_group)
    if vocab_size is not None and V_of_teacher * P < vocab_size:
        raise ValueError(
            f"teacher_weight must have the {vocab_size} rows of vocab_size, on {P} ranks "
            f"{-(-vocab_size // P)} each, got {got}"
        )


def _with_rows(arguments: Arguments, rows: Tensor, student: Arguments) -> Arguments:
    """Return the arguments with a copy of these rows of the whole vocabulary."""
    weight = arguments.weight
    bias = arguments.bias
    V = len(student.weight)
    check_plain("teacher_rows", rows, "rows")
    check_tensor("teacher_rows", rows, LABELS, student.hidden)
    if rows.shape != (V,):
        raise ValueError(
            f"teacher_rows must be [V] with V = {V} from weight, got {tuple(rows.shape)}"
        )
    start = collectives.group_rank(student.tp_group) * len(weight)
    if arguments.options.vocab_range is not None:
        with _named_as_the_teachers():
            check_range(arguments.options.vocab_range, len(weight))
        start, _ = arguments.options.vocab_range
    rows = rows.long() - start
    is_here = ((rows >= 0) & (rows < len(weight))).all()
    words = f"teacher_rows must be within this rank's rows [{start}, {start + len(weight)})"
    if rows.is_cuda:
        assert_soon(is_here, words)
    elif not is_here:
        raise ValueError(f"{words}, got {rows.add(start).tolist()[:8]} ...: use teacher_shard")
    return arguments._replace(
        weight=weight[rows],
        bias=None if bias is None else bias[rows],
        options=replace(arguments.options, vocab_range=student.options.vocab_range),
    )


def _facts(teacher: Call, operands: TeacherOperands) -> str:
    """Return what must be equal on all ranks."""
    options = teacher.options
    hidden, _, bias, inverse = operands
    return (
        f"hidden {list(hidden.shape)} {teacher.dtype}, softcap {options.softcap}, logit_scale "
        f"{options.logit_scale}, bias {bias is not None}, temperature {inverse is not None}"
    )


def _are_aligned(call: Call, rows: int, teacher: Call, teachers_rows: int) -> bool:
    """Whether both models' real rows are those of the same ids, as far as this rank knows."""
    if call.options.vocab_range is not None or teacher.options.vocab_range is not None:
        starts_alike = call.vocab_start_index == teacher.vocab_start_index
        return call.V == teacher.V and (starts_alike or call.V == 0)

    def real(n: int, rank: int) -> tuple[int, int]:
        return min(rank * n, call.vocab_size), min((rank + 1) * n, call.vocab_size)

    P = collectives.group_size(call.tp_group)
    return all(real(rows, rank) == real(teachers_rows, rank) for rank in range(P))
