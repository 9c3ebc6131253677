"""The loss of data-parallel ranks that share the vocabulary.  T tokens of one rank, P ranks."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from flce_dist.api import apply
from flce_dist.arguments import checks, values
from flce_dist.arguments.options import (
    OWN_SUM,
    DataParallelOptions,
    LossOptions,
    Reduction,
    keywords_of,
)
from flce_dist.arguments.prepare import Arguments, tempered
from flce_dist.arguments.rank_check import check_facts, refusals_told
from flce_dist.parallel import collectives

_FUNCTION = "data_parallel_linear_cross_entropy"


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

    Args:
        hidden, labels, token_weight, temperature: of this rank's tokens, equally many on all ranks.
            All ranks pass tensors of the same dtypes, or the same number as temperature; the first
            call of a group compares that, except under torch.compile.
        weight, bias: this rank's rows, or DTensors with Shard(0) over ``data_group``.
        data_group: the ranks that share the vocabulary; None for one process.
        reduction: over this rank's tokens. The upstream gradient of a sum or mean must be the same
            on all ranks; otherwise gradients are NaN.
        **options: of ``linear_cross_entropy``, but tp_group and what is about it. ``max_counted``
            bounds the tokens of all ranks.
    """
    with refusals_told(_FUNCTION, data_group, hidden):
        checked = checks.checked_options(
            **keywords_of(
                data_parallel_linear_cross_entropy,
                options,
                reduction=reduction,
                reduce_dhidden=True,
                sequence_parallel=data_group is not None,
                sequence_dim=0,
            )
        )
        checks.check_group(data_group, False, "data_group")
    given: dict[str, Any] = dict(labels=labels, token_weight=token_weight, temperature=temperature)
    _check_tokens_alike(hidden, given, reduction, data_group)
    flat, P = hidden.reshape(-1, *hidden.shape[-1:]), collectives.group_size(data_group)
    for name, x in given.items():
        if isinstance(x, Tensor):
            given[name] = collectives.gather_tokens(x.reshape(-1), data_group)
    given["temperature"] = tempered(given["temperature"], given["labels"])
    if reduction == "mean":  # a rank's sum of these weights over ``most`` is that rank's mean
        counted = (given["labels"] != checked.ignore_index).view(P, labels.numel())
        weights = counted.double() if token_weight is None else given["token_weight"].double()
        weights = weights.view_as(counted).where(counted, 0.0)
        norms = weights.sum(1).where(weights.any(1), 1.0)
        # The largest, not 1: a gradient over T would underflow in fp16.
        most = norms.abs().where(norms.isfinite(), 0.0).amax()
        given["token_weight"] = (weights * (most / norms)[:, None]).view(-1)
    if reduction != "none":
        checked = replace(checked, reduction=OWN_SUM)
    if flat.requires_grad:
        flat.register_hook(lambda dhidden: dhidden * P)  # of the own loss, not of the mean
    call = Arguments(flat, weight, bias=bias, options=checked, tp_group=data_group, **given)
    (loss,) = apply(_FUNCTION, call)
    if loss.requires_grad:
        loss.register_hook(lambda dloss: _upstream_of_mean(dloss, data_group))
    if reduction == "none":
        return loss.view(P, *labels.shape)[collectives.group_rank(data_group)]
    return loss / most.to(loss.dtype) if reduction == "mean" else loss


def _check_tokens_alike(
    hidden: Tensor, given: dict[str, Any], reduction: str, data_group: dist.ProcessGroup | None
) -> None:
    """Check what is gathered, at a group's first call that all ranks gather the same."""
    with refusals_told(_FUNCTION, data_group, hidden):
        checks.check_tensor("hidden", hidden, checks.FLOATS)
        flat = hidden.reshape(-1, *hidden.shape[-1:])
        temperature = given["temperature"]
        if not isinstance(temperature, Tensor):
            given = {**given, "temperature": None}
            temperature = values.positive("temperature", temperature)
        checks.check_tensors(hidden, flat, bias=None, **given)
        checks.check_tokens(hidden, given["labels"], LossOptions(), 1)
    facts: dict[str, Any] = {
        "reduction": reduction,
        "number of labels": given["labels"].numel(),
        "hidden": str(hidden.dtype),
        **{name: None if x is None else str(x.dtype) for name, x in given.items()},
    }
    if not isinstance(temperature, Tensor):
        facts["temperature"] = temperature
    check_facts(_FUNCTION, facts, data_group, hidden)


def _upstream_of_mean(dloss: Tensor, data_group: dist.ProcessGroup | None) -> Tensor:
    """Return the gradient of the mean over ranks, from that of this rank's loss or tokens [P T]."""
    P = collectives.group_size(data_group)
    if dloss.dim():
        return collectives.all_reduce_sum(dloss.clone(), data_group) / P  # others' are 0 here
    every = collectives.gather_tokens(dloss[None], data_group)
    return dloss.where((every == dloss).all(), torch.nan) / P
