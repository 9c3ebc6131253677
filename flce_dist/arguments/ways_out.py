"""What an error about a tensor suggests, if anything: the end of its message."""

from collections.abc import Sequence

import torch
from torch import Tensor

IN_FORWARD_OF_FSDP = (
    "call inside forward of the module that fully_shard was applied to, or in another method after "
    "register_fsdp_forward_method: FSDP2 gathers parameters only there"
)


def reshaped(name: str, x: Tensor, shape: Sequence[int]) -> str:
    """Return the way out if x has another shape only in dimensions of 1, or in their order."""
    got = list(x.shape)
    expected = list(shape)
    if [n for n in got if n != 1] == [n for n in expected if n != 1]:
        return f": pass {name}.reshape({tuple(expected)})"
    return f": pass {name}.T" if len(got) == 2 and got[::-1] == expected else ""


def converted(name: str, x: Tensor, dtypes: Sequence[torch.dtype]) -> str:
    """Return the way out if x holds numbers of another kind than ``dtypes``."""
    if x.is_complex() or x.is_quantized:
        return ""
    if torch.int64 in dtypes:
        if x.dtype == torch.bool:
            return ""
        way_out = f": pass {name}.long()"
        return f"{way_out} if they are ids" if x.is_floating_point() else way_out
    return "" if x.is_floating_point() else f": pass {name}.float()"


def split_tokens(labels: Tensor, tokens: list[int], P: int) -> str:
    """Return the way out if labels are of P times as many tokens along one dimension."""
    for dim, name in enumerate(("", ", sequence_dim=1")[: len(tokens)]):
        of_all = [n * P if i == dim else n for i, n in enumerate(tokens)]
        if P > 1 and list(labels.shape) == of_all:
            split = f"sequence_parallel=True{name}"
            return f": pass {split} if hidden is split over the {P} ranks of tp_group"
    return ""
