"""The loss of data-parallel ranks that share the vocabulary.  T tokens of one rank, P ranks."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.api import apply
from flce_dist.arguments import checks
from flce_dist.arguments.options import OWN_SUM, LossOptions, Reduction, keywords_of
from flce_dist.arguments.prepare import Arguments, tempered
from flce_dist.arguments.rank_check import check_lengths
from flce_dist.parallel import collectives


def data_parallel_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, data_group: dist.ProcessGroup | None,
    bias: Tensor | None = None, reduction: Reduction = "mean", token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0, **options: Any,
) -> Tensor:  # fmt: skip
    """Return this rank's ``linear_cross_entropy``, fp32 (fp64 for fp64 inputs).

    Gathers hidden states, not the weight. Gradients are FSDP2's: that of this rank's loss, and for
    weight and bias the mean over ranks. All ranks must call, and call backward.

    Args:
        hidden, labels, token_weight, temperature: of this rank's tokens, equally many on all ranks.
        weight, bias: this rank's rows, or DTensors with Shard(0) over ``data_group``.
        data_group: the ranks that share the vocabulary; None for one process.
        reduction: over this rank's tokens. The upstream gradient of a sum or mean must be the same
            on all ranks; otherwise gradients are NaN.
        **options: of ``linear_cross_entropy``, but tp_group and what is about it. ``max_counted``
            bounds the tokens of all ranks.
    """
    chosen = checks.checked_options(**keywords_of(
        data_parallel_linear_cross_entropy, options, reduction=reduction, reduce_dhidden=True,
        sequence_parallel=data_group is not None, sequence_dim=0,
    ))  # fmt: skip
    checks.check_group(data_group, False, "data_group")
    checks.check_tensor("hidden", hidden, checks.FLOATS)
    flat, P = hidden.reshape(-1, *hidden.shape[-1:]), collectives.group_size(data_group)
    given: dict[str, Any] = dict(labels=labels, token_weight=token_weight, temperature=temperature)
    tensors = {**given, "temperature": temperature if isinstance(temperature, Tensor) else None}
    checks.check_tensors(hidden, flat, bias=None, **tensors)
    checks.check_tokens(hidden, labels, LossOptions(), 1)
    if not torch.compiler.is_compiling():
        check_lengths(labels, data_group)
    for name, x in tensors.items():
        if x is not None:
            given[name] = collectives.gather_tokens(x.reshape(-1), data_group)
    given["temperature"] = tempered(given["temperature"], given["labels"])
    if reduction == "mean":  # a rank's sum of these weights over ``most`` is that rank's mean
        counted = (given["labels"] != chosen.ignore_index).view(P, labels.numel())
        weights = counted.double() if token_weight is None else given["token_weight"].double()
        weights = weights.view_as(counted).where(counted, 0.0)
        norms = weights.sum(1).where(weights.any(1), 1.0)
        # The largest, not 1: a gradient over T would underflow in fp16.
        most = norms.abs().where(norms.isfinite(), 0.0).amax()
        given["token_weight"] = (weights * (most / norms)[:, None]).view(-1)
    if reduction != "none":
        chosen = replace(chosen, reduction=OWN_SUM)
    if flat.requires_grad:
        flat.register_hook(lambda dhidden: dhidden * P)  # of the own loss, not of the mean
    call = Arguments(flat, weight, bias=bias, options=chosen, tp_group=data_group, **given)
    (loss,) = apply(call)
    if loss.requires_grad:
        loss.register_hook(lambda dloss: _upstream_of_mean(dloss, data_group))
    if reduction == "none":
        return loss.view(P, *labels.shape)[collectives.group_rank(data_group)]
    return loss / most.to(loss.dtype) if reduction == "mean" else loss


def _upstream_of_mean(dloss: Tensor, data_group: dist.ProcessGroup | None) -> Tensor:
    """Return the gradient of the mean over ranks, from that of this rank's loss or tokens [P T]."""
    P = collectives.group_size(data_group)
    if dloss.dim():
        return collectives.all_reduce_sum(dloss.clone(), data_group) / P  # others' are 0 here
    every = collectives.gather_tokens(dloss[None], data_group)
    return dloss.where((every == dloss).all(), torch.nan) / P
