"""How many GEMMs a step makes, counted by the operations that it really runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def gemms_of(step: Callable[[], Any], T: int, V: int, H: int) -> float:
    """The floating-point operations of a step over those of one GEMM of 2 T H V flop."""

    def product(acc: Any, a: list[int], b: list[int], **_: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product})
    with counter:
        step()
    return counter.get_total_flops() / (2 * T * V * H)
