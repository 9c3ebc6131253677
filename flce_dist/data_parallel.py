"""The loss of data-parallel ranks that share the vocabulary.  T tokens of one rank, P ranks."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from flce_dist.api import apply
from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import (
    FLOATS,
    check_group,
    check_numbers,
    check_tensor,
    check_tensors,
    check_tokens,
)
from flce_dist.arguments.decided_once import checked_options
from flce_dist.arguments.dtensor import check_plain
from flce_dist.arguments.gather_alike import FUNCTION, gathered_tokens
from flce_dist.arguments.options import (
    DataParallelOptions,
    LossOptions,
    Reduction,
    keywords_of,
)
from flce_dist.arguments.passed import Arguments, tempered
from flce_dist.arguments.rank_check import refusals_told, told_if_unbound
from flce_dist.core.autograd import refuse_tracing
from flce_dist.parallel import collectives
from flce_dist.parallel.upstream import serial_of_call, upstream_of_mean


@told_if_unbound
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
    """``linear_cross_entropy`` of this rank's tokens, where data-parallel ranks share the weight.

    Gathers hidden states, not the weight. With L_r the loss of rank r, gradients are those of
    FSDP2: dhidden on rank r is that of L_r, dweight and dbias those of ``sum_r L_r / P``. All
    ranks must call, and call backward.

    Backward exchanges upstream gradients, and with them the number of the call. Ranks that run
    backward of different calls raise (on a GPU a failed device assertion; not under torch.compile).
    A rank that skips backward and makes another collective, or none, cannot be told without one
    more collective: the others wait in the gather of 2 elements (T + 1 with reduction "none").

    Args:
        hidden: [..., H] of this rank's tokens, equally many on all ranks.
        labels, token_weight, temperature: [...], or for temperature a number, of the same tokens.
            All ranks pass tensors of the same dtypes, or the same number as temperature; the first
            call of a group compares that.
        weight: [V, H], this rank's rows of the vocabulary, by default [r V, (r + 1) V); or a
            DTensor with Shard(0) over ``data_group``.
        bias: [V], likewise.
        data_group: the ranks that share the vocabulary; None for one process.
        reduction: over this rank's tokens. The upstream gradient of a sum or mean must be the same
            on all ranks; otherwise gradients are NaN.
        **options: of ``linear_cross_entropy``, but tp_group and what is about it. ``max_counted``
            bounds the tokens of all ranks.

    Returns:
        The loss of this rank's tokens, fp32 (fp64 for fp64 inputs): a scalar, or [...] with
        reduction "none". A rank without a token that counts gets 0.

    Raises:
        ValueError: an argument is wrong, or ranks disagree. NotImplementedError: a combination is
        not supported.

    Example::

        rank, P = data_group.rank(), data_group.size()
        start, end = vocab_range(len(weight), rank, P)
        mine = weight[start:end].detach().requires_grad_()
        tokens = slice(rank * 4, rank * 4 + 4)  # this rank's own
        loss = data_parallel_linear_cross_entropy(
            hidden[tokens], mine, labels[tokens], data_group=data_group
        )
        loss.backward()
    """
    with refusals_told(FUNCTION, data_group, hidden):
        checked = checked_options(
            **keywords_of(
                data_parallel_linear_cross_entropy,
                options,
                reduction=reduction,
                reduce_dhidden=True,
                sequence_parallel=data_group is not None,
                sequence_dim=0,
                data_parallel=True,
            )
        )
        check_group(data_group, sequence_parallel=False, name="data_group")
    of_tokens: dict[str, Any] = dict(
        labels=labels, token_weight=token_weight, temperature=temperature
    )
    _check_tokens(hidden, of_tokens, data_group)
    flat = hidden.reshape(-1, *hidden.shape[-1:])
    P = collectives.group_size(data_group)
    tensors = [name for name, x in of_tokens.items() if isinstance(x, Tensor)]
    of_all_ranks = gathered_tokens(hidden, of_tokens, reduction, data_group)
    of_tokens.update(zip(tensors, of_all_ranks, strict=True))
    serial = serial_of_call(data_group)
    of_tokens["temperature"] = tempered(of_tokens["temperature"], of_tokens["labels"])
    if reduction == "mean":
        counted = of_tokens["labels"] != checked.ignore_index
        of_tokens["token_weight"], norm = _mean_as_sum(counted, of_tokens["token_weight"], P)
        checked = replace(checked, reduction="sum")
    if flat.requires_grad:
        flat.register_hook(lambda dhidden: dhidden * P)  # of the own loss, not of the mean
    call = Arguments(flat, weight, bias=bias, options=checked, tp_group=data_group, **of_tokens)
    (loss,) = apply(FUNCTION, call)
    if loss.requires_grad:
        loss.register_hook(lambda dloss: upstream_of_mean(FUNCTION, dloss, serial, data_group))
    if reduction == "none":
        return loss.view(P, *labels.shape)[collectives.group_rank(data_group)]
    return loss / norm.to(loss.dtype) if reduction == "mean" else loss


def _check_tokens(
    hidden: Tensor, of_tokens: dict[str, Any], data_group: dist.ProcessGroup | None
) -> None:
    """Check what is gathered, before ranks compare it."""
    with refusals_told(FUNCTION, data_group, hidden):
        refuse_tracing(FUNCTION, hidden)
        for name, x in {"hidden": hidden, **of_tokens}.items():
            check_plain(name, x, "tokens")
        check_tensor("hidden", hidden, FLOATS)
        of_tokens = dict(of_tokens)
        if not isinstance(of_tokens["temperature"], Tensor):
            values.positive("temperature", of_tokens["temperature"])
            of_tokens["temperature"] = None
        # The weight is not gathered, and checked later: one without rows stands for it.
        rows = hidden.new_empty(0, *hidden.shape[-1:])
        labels = of_tokens.pop("labels")
        check_tensors(hidden, rows, labels, bias=None)
        check_tokens(hidden, labels, LossOptions(), 1)
        check_numbers(hidden, labels, **of_tokens)


def _mean_as_sum(counted: Tensor, token_weight: Tensor | None, P: int) -> tuple[Tensor, Tensor]:
    """Return weights [P T] and a norm: a rank's weighted sum over the norm is that rank's mean.

    ``counted`` [P T] bool says which tokens are not ignored. The norm is the largest of all ranks,
    not 1: a gradient over T would underflow in fp16.
    """
    weights = counted.double() if token_weight is None else token_weight.double()
    weights = weights.where(counted, 0.0).view(P, len(counted) // P)
    norms = weights.sum(1).where(weights.any(1), 1.0)
    norm = norms.abs().where(norms.isfinite(), 0.0).amax()
    return (weights * (norm / norms)[:, None]).view(-1), norm
