"""The loss of data-parallel ranks that share the vocabulary.  T tokens of one rank, P ranks."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from flce_dist import torch_private
from flce_dist.api import apply
from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import (
    FLOATS,
    check_group,
    check_tensor,
    check_tensors,
    check_tokens,
)
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.options import (
    OWN_SUM,
    DataParallelOptions,
    LossOptions,
    Reduction,
    keywords_of,
)
from flce_dist.arguments.passed import Arguments, tempered
from flce_dist.arguments.rank_check import check_facts, mark_alike, refusals_told
from flce_dist.parallel import collectives

_FUNCTION = "data_parallel_linear_cross_entropy"
_WAY_OUT = (
    "a rank that skips backward of a loss, for example where it is not finite, must do so on all "
    "ranks of data_group"
)
_MOST_SERIALS = 1 << 20  # exact in fp32
_serials: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The serial number of each group's last call."""


def data_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    data_group: dist.ProcessGroup | None,
    bias: Tensor | None = None,
    reduction: Reduction = "mean",
    token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    **options: Unpack[DataParallelOptions],
) -> Tensor:
    """Return this rank's ``linear_cross_entropy``, fp32 (fp64 for fp64 inputs).

    Gathers hidden states, not the weight. Gradients are FSDP2's: that of this rank's loss, and for
    weight and bias the mean over ranks. All ranks must call, and call backward.

    Backward exchanges upstream gradients, and with them the number of the call. Ranks that run
    backward of different calls raise (on a GPU a failed device assertion; not under torch.compile).
    A rank that skips backward and makes another collective, or none, cannot be told without one
    more collective: the others wait in the gather of 2 elements (T + 1 with reduction "none").

    Args:
        hidden, labels, token_weight, temperature: of this rank's tokens, equally many on all ranks.
            All ranks pass tensors of the same dtypes, or the same number as temperature; the first
            call of a group compares that.
        weight, bias: this rank's rows, or DTensors with Shard(0) over ``data_group``.
        data_group: the ranks that share the vocabulary; None for one process.
        reduction: over this rank's tokens. The upstream gradient of a sum or mean must be the same
            on all ranks; otherwise gradients are NaN.
        **options: of ``linear_cross_entropy``, but tp_group and what is about it. ``max_counted``
            bounds the tokens of all ranks.
    """
    with refusals_told(_FUNCTION, data_group, hidden):
        checked = checked_options(
            **keywords_of(
                data_parallel_linear_cross_entropy,
                options,
                reduction=reduction,
                reduce_dhidden=True,
                sequence_parallel=data_group is not None,
                sequence_dim=0,
            )
        )
        check_group(data_group, False, "data_group")
    of_tokens: dict[str, Any] = dict(
        labels=labels, token_weight=token_weight, temperature=temperature
    )
    _check_tokens(hidden, of_tokens, data_group)
    flat = hidden.reshape(-1, *hidden.shape[-1:])
    P = collectives.group_size(data_group)
    tensors = [name for name, x in of_tokens.items() if isinstance(x, Tensor)]
    of_all_ranks = _gathered(hidden, of_tokens, reduction, data_group)
    of_tokens.update(zip(tensors, of_all_ranks, strict=True))
    serial = _serial_of_call(data_group)
    of_tokens["temperature"] = tempered(of_tokens["temperature"], of_tokens["labels"])
    if reduction == "mean":  # a rank's sum of these weights over ``most`` is that rank's mean
        counted = (of_tokens["labels"] != checked.ignore_index).view(P, labels.numel())
        weights = counted.double() if token_weight is None else of_tokens["token_weight"].double()
        weights = weights.view_as(counted).where(counted, 0.0)
        norms = weights.sum(1).where(weights.any(1), 1.0)
        # The largest, not 1: a gradient over T would underflow in fp16.
        most = norms.abs().where(norms.isfinite(), 0.0).amax()
        of_tokens["token_weight"] = (weights * (most / norms)[:, None]).view(-1)
    if reduction != "none":
        checked = replace(checked, reduction=OWN_SUM)
    if flat.requires_grad:
        flat.register_hook(lambda dhidden: dhidden * P)  # of the own loss, not of the mean
    call = Arguments(flat, weight, bias=bias, options=checked, tp_group=data_group, **of_tokens)
    (loss,) = apply(_FUNCTION, call)
    if loss.requires_grad:
        loss.register_hook(lambda dloss: _upstream_of_mean(dloss, serial, data_group))
    if reduction == "none":
        return loss.view(P, *labels.shape)[collectives.group_rank(data_group)]
    return loss / most.to(loss.dtype) if reduction == "mean" else loss


def _check_tokens(
    hidden: Tensor, of_tokens: dict[str, Any], data_group: dist.ProcessGroup | None
) -> None:
    """Check what is gathered, before ranks compare it."""
    with refusals_told(_FUNCTION, data_group, hidden):
        check_tensor("hidden", hidden, FLOATS)
        flat = hidden.reshape(-1, *hidden.shape[-1:])
        if not isinstance(of_tokens["temperature"], Tensor):
            values.positive("temperature", of_tokens["temperature"])
            of_tokens = {**of_tokens, "temperature": None}
        check_tensors(hidden, flat, bias=None, **of_tokens)
        check_tokens(hidden, of_tokens["labels"], LossOptions(), 1)


def _gathered(
    hidden: Tensor, of_tokens: dict[str, Any], reduction: str, data_group: dist.ProcessGroup | None
) -> Sequence[Tensor]:
    """Return the tensors that are given, of all ranks' tokens [P T]; ranks first compare them."""
    temperature = of_tokens["temperature"]
    number = None if isinstance(temperature, Tensor) else float(temperature)
    temperature = temperature if number is None else None
    own = of_tokens["labels"], of_tokens["token_weight"], temperature
    if data_group is not None and torch.compiler.is_compiling():
        gather = torch.ops.flce_dist.gather_alike
        return gather(hidden.detach(), *own, number, reduction, data_group.group_name)
    return _gather_alike(hidden, *own, number, reduction, data_group)


def _gather_alike(
    hidden: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    temperature: Tensor | None,
    number: float | None,
    reduction: str,
    data_group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Compare what decides the gathers, at a group's first call, then gather."""
    of_tokens = {"labels": labels, "token_weight": token_weight, "temperature": temperature}
    facts: dict[str, Any] = {
        "reduction": reduction,
        "number of labels": labels.numel(),
        "hidden": str(hidden.dtype),
        **{name: None if x is None else str(x.dtype) for name, x in of_tokens.items()},
    }
    if number is not None:
        facts["temperature"] = number
    check_facts(_FUNCTION, facts, data_group, hidden)
    tensors = [x.reshape(-1) for x in of_tokens.values() if x is not None]
    return [collectives.gather_tokens(x, data_group) for x in tensors]


def _operator(*inputs):
    """``_gather_alike`` in compiled code, which must not gather before it compares."""
    data_group = torch_private.group_named(inputs[-1])
    own: Any = (*inputs[:-1], data_group)
    of_all_ranks = _gather_alike(*own)
    mark_alike(_FUNCTION, data_group)
    return of_all_ranks


def _fake_operator(hidden, labels, token_weight, temperature, *others):
    P = collectives.group_size(torch_private.group_named(others[-1]))
    own = [x for x in (labels, token_weight, temperature) if x is not None]
    return [x.new_empty(P * x.numel()) for x in own]


def _serial_of_call(data_group: dist.ProcessGroup | None) -> int:
    """Return the number of this call of a group; 0 in compiled code, where it would be constant."""
    if data_group is None or torch.compiler.is_compiling():
        return 0
    _serials[data_group] = _serials.get(data_group, 0) % _MOST_SERIALS + 1
    return _serials[data_group]


def _upstream_of_mean(dloss: Tensor, serial: int, data_group: dist.ProcessGroup | None) -> Tensor:
    """Return the gradient of the mean over ranks, from that of this rank's loss or tokens [P T].

    Ranks send the serial number of their call behind it: [2], or [T + 1].
    """
    P = collectives.group_size(data_group)
    rank = collectives.group_rank(data_group)
    own = dloss.view(P, dloss.numel() // P)[rank] if dloss.dim() else dloss[None]  # others' are 0
    message = torch.cat((own, own.new_full((1,), serial)))
    try:
        every = collectives.gather_tokens(message, data_group).view(P, len(message))
    except RuntimeError as error:
        raise RuntimeError(f"{_FUNCTION}: ranks did not meet in backward; {_WAY_OUT}") from error
    upstream = every[:, :-1]
    serials = every[:, -1]
    if serial:
        words = f"{_FUNCTION}: ranks run backward of different calls; {_WAY_OUT}"
        torch_private.assert_soon((serials == serial).all(), words)
    if dloss.dim():
        return upstream.reshape(-1) / P
    return dloss.where((upstream == dloss).all(), torch.nan) / P


torch.library.custom_op(
    "flce_dist::gather_alike",
    _operator,
    mutates_args=(),
    schema="(Tensor hidden, Tensor labels, Tensor? token_weight, Tensor? temperature, "
    "float? number, str reduction, str group_name) -> Tensor[]",
).register_fake(_fake_operator)
torch_private.keep_order(torch.ops.flce_dist.gather_alike.default)
