"""Tensors of tokens: [b, s, ...] as a model's users have them, [s, b, ...] as its layers do.

s sequence, b batch, H hidden size, P tensor-parallel size.
"""

import math
from typing import Any

import torch
from torch import Tensor

from flce_dist.arguments import values
from flce_dist.arguments.check_tensors import is_dense
from flce_dist.arguments.rank_check import refusals_told


def check_tokens(layer: Any, function: str, hidden: Tensor, **of_tokens: Any) -> None:
    """Check that tensors are [b, s], ``ids`` [b, s, K], for ``hidden`` [s, b, H] of all ranks.

    Under sequence parallelism hidden is [s / P, b, H]. What is no dense tensor, or a scalar, is
    left to ``function``, which the layer calls next.
    """
    s, b = hidden.shape[:2]
    ranks = layer.tp_group.size() if layer.sequence_parallel else 1
    tokens = (b, s * ranks)
    for name, x in of_tokens.items():
        if not has_dimensions(x) or x.dim() == 0:
            continue
        dims = 3 if name == "ids" else 2
        if x.shape[:2] == tokens and x.dim() == dims:
            continue
        layout = "[b, s, K]" if dims == 3 else "[b, s]"
        expected = values.shape(*tokens, *["K"] * (dims - 2))
        way_out = _way_out(name, x, tokens, dims, is_split=x.shape[:2] == (b, s) != tokens)
        with refusals_told(function, layer.tp_group, hidden):
            raise ValueError(
                f"{name} must be {layout} = {expected}, as the model's tokens, got "
                f"{tuple(x.shape)}{way_out}"
            )


def _way_out(name: str, x: Tensor, tokens: tuple[int, int], dims: int, *, is_split: bool) -> str:
    """Return what to pass in place of x to have ``dims`` dimensions, first those of tokens [b, s].

    ``is_split`` says whether x is of this rank's tokens alone.
    """
    if is_split:
        return ": pass those of whole sequences, since hidden states alone are split"
    of_one_id = "[..., None]" if x.dim() < dims else ""
    if x.shape[:2] == tokens:
        if of_one_id:
            return f": pass {name}{of_one_id}"
    elif x.shape[:2] == tokens[::-1]:
        return f": pass {name}.transpose(0, 1){of_one_id}"
    last = () if dims == 2 else x.shape[-1:] if x.dim() > 1 else (1,)
    has_as_many = x.numel() == math.prod((*tokens, *last))
    return f": pass {name}.reshape({(*tokens, *last)})" if has_as_many else ""


def transposed(x: Any) -> Any:
    """[b, s, ...] to [s, b, ...] and back; what is no such tensor stays as it is."""
    return x.transpose(0, 1).contiguous() if has_dimensions(x) and x.dim() > 1 else x


def by_sequence(x: Tensor, ranks: int) -> Tensor:
    """[s, b, ...] to [ranks * b, s / ranks, ...], in each rank's part one sequence after the other.

    Its own inverse. What is no such tensor stays as it is; so does any x with ``ranks=0``.
    """
    if not (ranks and has_dimensions(x)) or x.dim() < 2:
        return x
    return x.unflatten(0, (ranks, -1)).transpose(1, 2).flatten(0, 1)


def has_dimensions(x: Any) -> bool:
    """Whether x is a dense tensor, whose dimensions may be put into another order."""
    return isinstance(x, Tensor) and is_dense(x)


def copy_transposed(x: Tensor) -> Tensor:
    """[s, b] to [b, s], a scalar as it is. A copy: FSDP2 warns of modules that return views."""
    if x.dim() < 2:
        return x
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format)
