"""LoRA on the output layer: columns behind those of hidden and weight.

V vocabulary rows of this rank, H hidden size, r the rank of the adapter.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import FLOATS, check_tensor, dtype_in_autocast
from flce_dist.arguments.options import LossOptions
from flce_dist.arguments.passed import (
    Arguments,
    check_passed,
    in_autocast_dtype,
)


def with_low_rank(
    arguments: Arguments, low_rank: tuple[Tensor, Tensor]
) -> tuple[Arguments, Tensor | None]:
    """Return arguments whose hidden and weight have the low rank's columns behind their own.

    And these columns of the weight, if they are trained and the others are not.
    """
    arguments = in_autocast_dtype(arguments)
    check_passed(arguments)  # before columns are added, so that complaints name the caller's
    hidden = arguments.hidden
    weight = arguments.weight
    check_pair(low_rank, arguments.options)
    x, b = (y.to(dtype_in_autocast(y, hidden.device.type)) for y in low_rank)
    check_factors(x, b, hidden, weight)
    is_trained = torch.is_grad_enabled() and b.requires_grad and not weight.requires_grad
    columns = b.detach() if is_trained else b
    wide = arguments._replace(
        hidden=torch.cat((hidden, x), -1), weight=torch.cat((weight, columns), 1)
    )
    return wide, b if is_trained else None


def check_pair(low_rank: object, options: LossOptions) -> None:
    """Check that it is a pair of plain tensors, and that the options take one."""
    if not isinstance(low_rank, (tuple, list)) or len(low_rank) != 2:
        got = values.shown(low_rank)
        raise ValueError(f"low_rank must be None or a pair of tensors (x, b), got {got}")
    for i, x in enumerate(low_rank):
        check_tensor(f"low_rank[{i}]", x, FLOATS)
        if isinstance(x, DTensor):
            raise NotImplementedError(
                f"low_rank[{i}] must be a plain tensor, got a DTensor: pass this rank's part, "
                "to_local()"
            )
    if options.accumulate_dweight or not isinstance(options.schedule, str):
        raise NotImplementedError(
            "low_rank needs accumulate_dweight=False and a schedule that is a name, got "
            f"accumulate_dweight={options.accumulate_dweight} and schedule={options.schedule!r}"
        )


def check_factors(x: Tensor, b: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Check the pair's shapes and dtypes, in autocast's, against those of hidden and weight."""
    for i, factor in enumerate((x, b)):
        check_tensor(f"low_rank[{i}]", factor, (hidden.dtype,), hidden)
    if x.shape[:-1] != hidden.shape[:-1] or x.dim() < 1:
        raise ValueError(
            f"low_rank[0] must be {values.shape(*hidden.shape[:-1], 'r')} from hidden "
            f"{tuple(hidden.shape)}, got {tuple(x.shape)}"
        )
    if b.shape != (len(weight), x.shape[-1]):
        raise ValueError(
            f"low_rank[1] must be [V, r] with V = {len(weight)} from weight and r = {x.shape[-1]} "
            f"from low_rank[0], got {tuple(b.shape)}"
        )
