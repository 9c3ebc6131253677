"""Gradients that forward makes: what they contain, how they are saved, and backward's part.

T = tokens of the group, V = rows here, H = hidden size, P = ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flce_dist.core.call import Call, Operands
from flce_dist.core.interface import Backward, Results
from flce_dist.core.sections import tokens_here
from flce_dist.kernels.rows.formulas import power_of_two


class SavedGradients(NamedTuple):
    norm: Tensor | None  # in fp16, a scalar that the gradients are still to be divided by
    dhidden: Tensor | None  # in fp32 for fp16, as dweight
    dweight: Tensor | None
    dbias: Tensor | None  # in the dtype of statistics
    labels: Tensor | None  # of dhidden's tokens, if each has an upstream gradient of its own


def factors_of_forward(
    call: Call, operands: Operands, norm: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return token weights and a norm that gradients of forward contain, and a norm for backward.

    In fp16 the gradient of a mean, and hidden times a small weight, may underflow before backward
    applies the loss scale: there the norm waits for it, as does the weights' power of two.
    """
    weights = operands.token_weight
    options = call.options
    if not call.is_fp16:
        return weights, norm, None
    if weights is None or options.reduction == "none":  # there dhidden alone is made, in fp32
        return weights, None, norm
    counts = (operands.labels != options.ignore_index) & weights.isfinite()
    sizes = weights.abs().where(counts, 0.0)
    size = power_of_two(sizes.amax() if len(sizes) else sizes.sum())
    return weights / size, None, (torch.ones_like(size) if norm is None else norm) / size


def times_upstream(request: Backward) -> Results:
    """Return the ``SavedGradients`` times the upstream gradient, as far as the call needs them.

    It is a scalar, or with ``labels`` one of each token.
    """
    call = request.call
    upstream = request.upstream
    assert upstream.loss is not None
    norm, dhidden, dweight, dbias, labels = SavedGradients(*request.saved)
    if labels is not None:
        return _times_each(request, dhidden, labels), None, None
    factor = upstream.loss if norm is None else upstream.loss / norm

    def times_factor(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if gradient is None:
            return None
        in_place = request.is_last and gradient.dtype == dtype
        result = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
        call.kernels.scale(gradient, factor, out=result)
        return result

    dweight = times_factor(dweight if call.needs.weight else None, saved_dtype(call.dtype))
    return times_factor(dhidden, call.dtype), dweight, times_factor(dbias, call.dtype)


def labels_of_dhidden(call: Call, operands: Operands) -> Tensor:
    """Return the labels of the tokens that dhidden has here, ignored where they do not count."""
    labels = operands.labels
    ignore_index = call.options.ignore_index
    if operands.places is not None:
        ignored = labels.new_full((call.T_all,), ignore_index)
        labels = ignored.index_copy_(0, operands.places, labels)
    return tokens_here(call, labels).clone()  # an operator must not return its inputs


def _times_each(request: Backward, dhidden: Tensor | None, labels: Tensor) -> Tensor | None:
    """Return dhidden times each token's upstream gradient."""
    call = request.call
    dloss = request.upstream.loss
    if dhidden is None or dloss is None:
        return None
    dloss = tokens_here(call, dloss).to(call.stats_dtype).contiguous()
    in_place = request.is_last and dhidden.dtype == call.dtype
    out = dhidden if in_place else torch.empty_like(dhidden, dtype=call.dtype)
    ignore_index = call.options.ignore_index
    call.kernels.scale_rows(dhidden, dloss, labels, ignore_index=ignore_index, out=out)
    return out


def saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are saved: not fp16, whose range they may leave before
    the upstream gradient arrives.
    """
    return torch.float32 if dtype == torch.float16 else dtype
