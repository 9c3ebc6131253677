"""What an error about a tensor suggests, if anything: the end of its message."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

IN_FORWARD_OF_FSDP = (
    "call inside forward of the module that fully_shard was applied to, or in another method after "
    "register_fsdp_forward_method: FSDP2 gathers parameters only there"
)


def as_tensor(name: str, x: object) -> str:
    """Return the way out if x is no tensor but has one, or holds the numbers of one."""
    if isinstance(x, nn.Module) and isinstance(getattr(x, "weight", None), Tensor):
        return f": pass {name}.weight"
    if isinstance(x, list) or type(x).__module__ == "numpy":
        return f": pass torch.as_tensor({name})"
    return ""


def reshaped(name: str, x: Tensor, shape: Sequence[int]) -> str:
    """Return the way out if x differs only in dimensions of 1, in being flat, or in their order."""
    got = list(x.shape)
    expected = list(shape)
    is_flat = 1 in (len(got), len(expected)) and math.prod(got) == math.prod(expected)
    if is_flat:
        return f": pass {name}.reshape({tuple(expected)})"
    return in_their_order(name, x, shape)


def in_their_order(name: str, x: Tensor, shape: Sequence[int]) -> str:
    """Return the way out if x differs only in dimensions of 1, or in the order of two."""
    got = list(x.shape)
    expected = list(shape)
    if [n for n in got if n != 1] == [n for n in expected if n != 1]:
        return f": pass {name}.reshape({tuple(expected)})"
    return f": pass {name}.T" if len(got) == 2 and got[::-1] == expected else ""


def logits_or_transposed(hidden: Tensor, weight: Tensor) -> str:
    """Return the way out if hidden's last dimension is weight's first one."""
    if weight.dim() != 2 or weight.shape[0] != hidden.shape[-1]:
        return ""
    return (
        ": if hidden holds logits, pass the output layer's input; if weight is [H, V], pass "
        "weight.T"
    )


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


def of_all_ranks(labels: Tensor, hidden: Tensor, expected: Sequence[int], sequence_dim: int) -> str:
    """Return the way out if hidden is split over ranks, and labels are not of all their tokens."""
    if labels.shape == hidden.shape[:-1]:
        return ": pass those of all ranks, since hidden alone is split"
    way_out = in_their_order("labels", labels, expected)
    if way_out:
        return way_out
    if sequence_dim == 0 and max(hidden.dim() - 1, labels.dim()) > 1:
        return (
            ": pass hidden [B, S / P, H], split along dimension 1, and labels [B, S] with "
            "sequence_dim=1, since flattening would give tokens other labels"
        )
    return ""
