"""The gather of data-parallel ranks' tokens, which they compare first, also in compiled code."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments.rank_check import check_facts, mark_alike
from flce_dist.parallel import collectives
from flce_dist.torch_private.compiling import keep_order
from flce_dist.torch_private.groups import group_named

FUNCTION = "data_parallel_linear_cross_entropy"


def gathered_tokens(
    hidden: Tensor, of_tokens: dict[str, Any], reduction: str, data_group: dist.ProcessGroup | None
) -> Sequence[Tensor]:
    """Return the tensors in ``of_tokens`` of all ranks, [P T] each; ranks compare them first."""
    temperature = of_tokens["temperature"]
    number = None if isinstance(temperature, Tensor) else float(temperature)
    temperature = temperature if number is None else None
    own = of_tokens["labels"], of_tokens["token_weight"], temperature
    if data_group is not None and torch.compiler.is_compiling():
        gather = torch.ops.flce_dist.gather_alike
        return gather(hidden.detach(), *own, number, reduction, data_group.group_name)
    _compare(hidden, *own, number, reduction, data_group)
    return _gather(own, data_group)


def _compare(
    hidden: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    temperature: Tensor | None,
    number: float | None,
    reduction: str,
    data_group: dist.ProcessGroup | None,
) -> bool:
    """Compare what decides the gathers; return whether that was needed."""
    of_tokens = {"labels": labels, "token_weight": token_weight, "temperature": temperature}
    facts: dict[str, Any] = {
        "reduction": reduction,
        "number of labels": labels.numel(),
        "hidden": str(hidden.dtype),
        **{name: None if x is None else str(x.dtype) for name, x in of_tokens.items()},
    }
    if number is not None:
        facts["temperature"] = number
    return check_facts(FUNCTION, facts, data_group, hidden)


def _gather(own: Sequence[Tensor | None], data_group: dist.ProcessGroup | None) -> list[Tensor]:
    tensors = [x.reshape(-1) for x in own if x is not None]
    return [collectives.gather_tokens(x, data_group) for x in tensors]


def _operator(hidden, labels, token_weight, temperature, number, reduction, group_name):
    """The same in compiled code, which must not gather before it compares."""
    data_group = group_named(group_name)
    own = labels, token_weight, temperature
    if _compare(hidden, *own, number, reduction, data_group):
        mark_alike(FUNCTION, data_group)
    return _gather(own, data_group)


def _fake_operator(hidden, labels, token_weight, temperature, number, reduction, group_name):
    P = collectives.group_size(group_named(group_name))
    own = [x for x in (labels, token_weight, temperature) if x is not None]
    return [x.new_empty(P * x.numel()) for x in own]


torch.library.custom_op(
    "flce_dist::gather_alike",
    _operator,
    mutates_args=(),
    schema="(Tensor hidden, Tensor labels, Tensor? token_weight, Tensor? temperature, "
    "float? number, str reduction, str group_name) -> Tensor[]",
).register_fake(_fake_operator)
keep_order(torch.ops.flce_dist.gather_alike.default)
