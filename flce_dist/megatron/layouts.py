"""Tensors of tokens: [b, s, ...] as a model's users have them, [s, b, ...] as its layers do.

s sequence, b batch, H hidden size, P tensor-parallel size.
"""

from typing import Any

import torch
from torch import Tensor

from flce_dist.arguments.rank_check import refusals_told


def check_tokens(layer: Any, function: str, hidden: Tensor, **of_tokens: Any) -> None:
    """Check that tensors are [b, s, ...] of the tokens of ``hidden`` [s, b, H] and all ranks.

    Under sequence parallelism hidden is [s / P, b, H]. What is no tensor, or a scalar, is left to
    ``function``, which the layer calls next.
    """
    s, b = hidden.shape[:2]
    ranks = layer.tp_group.size() if layer.sequence_parallel else 1
    expected = (b, s * ranks)
    for name, x in of_tokens.items():
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[:2] == expected:
            continue
        got = tuple(x.shape)
        way_out = ""
        if got[:2] == (b, s):
            way_out = ": pass those of whole sequences, since hidden states alone are split"
        elif got[:2] == expected[::-1]:
            way_out = f": pass {name}.transpose(0, 1)"
        with refusals_told(function, layer.tp_group, hidden):
            raise ValueError(
                f"{name} must be [b, s] = {expected}, as the model's tokens, got {got}{way_out}"
            )


def transposed(x: Any) -> Any:
    """[b, s, ...] to [s, b, ...] and back; what is no such tensor stays as it is."""
    return x.transpose(0, 1).contiguous() if isinstance(x, Tensor) and x.dim() > 1 else x


def copy_transposed(x: Tensor) -> Tensor:
    """[s, b] to [b, s], a scalar as it is. A copy: FSDP2 warns of modules that return views."""
    if x.dim() < 2:
        return x
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format)
