"""Lower bounds of every implementation: its GEMMs alone, and reading the weight once.

``torch.mm`` writes the GEMMs into preallocated outputs, on the data of the problem (zeros would run
faster, since the GPU draws less power). The GEMMs of both gradients read the buffer of the logits.

T = tokens, H = hidden size, V = vocabulary rows on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Floor:
    """``make(hidden [T, H], weight [V, H])`` allocates and returns what is to be timed."""

    make: Callable[[Tensor, Tensor], Callable[[], Any]]
    mode: Literal["forward", "forward_backward"]


def gemms(
    hidden: Tensor, weight: Tensor, *, logits: int, of_hidden: bool, of_weight: bool
) -> Callable[[], None]:
    """Return a call that runs the GEMM of the logits ``logits`` times, of each gradient once."""
    hidden = hidden.detach()
    weight = weight.detach()
    z = hidden.new_empty(len(hidden), len(weight))
    dhidden = torch.empty_like(hidden)
    dweight = torch.empty_like(weight) if of_weight else None

    def run() -> None:
        for _ in range(logits):
            torch.mm(hidden, weight.T, out=z)
        if of_hidden:
            torch.mm(z, weight, out=dhidden)
        if dweight is not None:
            torch.mm(z.T, hidden, out=dweight)

    return run


def _read_weight(hidden: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    """Sum the weight, as 32-bit numbers where it can be: the widest loads a reduction makes."""
    flat = weight.detach().flatten()
    words = flat.view(torch.float32) if flat.numel() * flat.element_size() % 4 == 0 else flat
    return words.sum


FLOORS = {
    "gemm1": Floor(partial(gemms, logits=1, of_hidden=False, of_weight=False), "forward"),
    "read_weight": Floor(_read_weight, "forward"),
    "gemm2_forward": Floor(partial(gemms, logits=2, of_hidden=False, of_weight=False), "forward"),
    "gemm2": Floor(partial(gemms, logits=1, of_hidden=True, of_weight=False), "forward_backward"),
    "gemm3": Floor(partial(gemms, logits=1, of_hidden=True, of_weight=True), "forward_backward"),
    "gemm4": Floor(partial(gemms, logits=2, of_hidden=True, of_weight=True), "forward_backward"),
    "gemm6": Floor(partial(gemms, logits=4, of_hidden=True, of_weight=True), "forward_backward"),
}
