"""What a caller passed: one tuple, then with sequence first and in autocast's dtype."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import (
    LABELS,
    check_group,
    check_numbers,
    check_tensor,
    check_tensors,
    check_tokens,
    dtype_in_autocast,
)
from flce_dist.arguments.options import LossOptions
from flce_dist.core.call import Needs
from flce_dist.parallel import collectives

_Result = TypeVar("_Result", Tensor, Tensor | None)

PLAIN = (Tensor, torch.nn.Parameter)
_LOCAL = {*PLAIN, float, type(None)}  # types of arguments that are this rank's alone


class Arguments(NamedTuple):
    """The arguments of ``linear_cross_entropy``, before and after they are ``settled``."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    token_weight: Tensor | None
    temperature: Any  # a tensor or None, as ``tempered`` returns it; before, a number, too
    options: LossOptions
    tp_group: dist.ProcessGroup | None


def may_have_dtensors(arguments: Arguments) -> bool:
    """Whether some may be of a type of tensor that has to be looked at, such as a DTensor.

    No property: the Dynamo of torch 2.9 traces none of a NamedTuple.
    """
    return not _LOCAL.issuperset(map(type, arguments[:6]))


def tempered(temperature: Any, labels: Tensor) -> Tensor | None:
    """Return the temperature of each token; None if it is the number 1."""
    if isinstance(temperature, Tensor):
        return temperature
    if type(temperature) is float and temperature == 1.0:  # the default
        return None
    temperature = values.positive("temperature", temperature)
    if temperature == 1.0:
        return None
    check_tensor("labels", labels, LABELS)
    return torch.full_like(labels, temperature, dtype=torch.float64)


def shape_of_tokens(hidden: Tensor, options: LossOptions, tp_group: Any) -> list[int]:
    """Return the shape that labels of hidden's tokens have, or those of all ranks."""
    tokens = list(hidden.shape[:-1])
    if options.sequence_parallel and options.sequence_dim < len(tokens):
        check_group(tp_group, sequence_parallel=options.sequence_parallel)
        tokens[options.sequence_dim] *= collectives.group_size(tp_group)
    return tokens


def sequence_first(arguments: Arguments) -> Arguments:
    """Return the arguments with the dimension that is split by token as the first.

    [B, S / P, H] of each rank then follow one another, as [S / P, B, H], in the order of labels.
    """
    options = arguments.options
    if not (options.sequence_parallel and options.sequence_dim):
        return arguments
    check_passed(arguments)
    names = ("hidden", "labels", "token_weight", "temperature")
    of_tokens = {name: getattr(arguments, name) for name in names}
    turned = {name: x.transpose(0, 1) for name, x in of_tokens.items() if x is not None}
    return arguments._replace(**turned, options=replace(options, sequence_dim=0))


def in_callers_order(
    results: Iterable[_Result], ordered: Arguments, arguments: Arguments
) -> tuple[_Result, ...]:
    """Undo ``sequence_first`` in results; ``ordered`` are the ``arguments``, settled."""
    if ordered.options is arguments.options:
        return tuple(results)
    return tuple(
        x.transpose(0, 1).contiguous() if x is not None and x.dim() else x for x in results
    )


def in_autocast_dtype(arguments: Arguments) -> Arguments:
    """Under autocast, cast the operands to its dtype as ``torch.nn.functional.linear`` does."""
    hidden = arguments.hidden
    weight = arguments.weight
    bias = arguments.bias
    if not isinstance(hidden, Tensor):
        return arguments
    device_type = hidden.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return arguments

    def to(x: Any) -> Any:
        return x.to(dtype_in_autocast(x, device_type)) if isinstance(x, Tensor) else x

    return arguments._replace(hidden=to(hidden), weight=to(weight), bias=to(bias))


def settled(arguments: Arguments, last_columns: Tensor | None = None) -> tuple[Arguments, Needs]:
    """Return the arguments as they are computed, and which operands need a gradient now.

    ``last_columns`` are those of the weight that alone are trained, if so.
    """
    arguments = sequence_first(in_autocast_dtype(arguments))
    trained = arguments.weight if last_columns is None else last_columns
    operands = (arguments.hidden, trained, arguments.bias)
    is_on = torch.is_grad_enabled()
    return arguments, Needs(*(is_on and getattr(x, "requires_grad", False) for x in operands))


def check_passed(arguments: Arguments) -> int:
    """Check the group, and the tensors as far as its size P tells; return P."""
    hidden, weight, labels, bias, token_weight, temperature, options, tp_group = arguments
    check_group(tp_group, sequence_parallel=options.sequence_parallel)
    check_tensors(hidden, weight, labels, bias)
    P = collectives.group_size(tp_group)
    check_tokens(hidden, labels, options, P)
    check_numbers(hidden, labels, token_weight=token_weight, temperature=temperature)
    return P
