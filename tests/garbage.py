"""Tensors that a call leaves in cycles of references."""

import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_in_cycles(call: Callable[[], Any]) -> list[tuple[int, ...]]:
    """The shapes of tensors that stay after ``call`` until Python collects its garbage.

    Trainers collect it rarely, or never: it stops all ranks.
    """
    call()  # what is decided or compiled at first is none of these
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        return [tuple(x.shape) for x in gc.garbage if isinstance(x, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
