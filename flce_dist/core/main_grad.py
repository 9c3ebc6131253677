"""``accumulate_dweight``: backward adds dweight to the trainer's ``weight.main_grad``.

Attributes of the weight are those of Megatron and TransformerEngine: ``main_grad``,
``grad_added_to_main_grad``, and with Megatron-FSDP ``get_main_grad`` and ``overwrite_main_grad``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flce_dist.arguments.check_tensors import check_tensor
from flce_dist.core.call import Call
from flce_dist.core.interface import Accumulator
from flce_dist.torch_private.engine import backward_id


@dataclass(frozen=True)
class MainGrad:
    """The trainer's accumulator of dweight, which autograd must not save.

    It remembers nothing: backward may run several times.
    """

    weight: Any  # what the caller passed, before autocast
    buffer: Tensor | None  # its main_grad in forward, [V, H]; None if backward calls get_main_grad
    dtype: torch.dtype  # of the operands

    def opened(self) -> Accumulator:
        """Return what the GEMMs write."""
        weight = self.weight
        main_grad = self.buffer
        if main_grad is None:
            main_grad = weight.get_main_grad()
            _check(main_grad, weight, self.dtype)
        weight.main_grad = main_grad  # as Megatron does: buffers may have been exchanged since
        if not getattr(weight, "overwrite_main_grad", self.buffer is None):
            return Accumulator(main_grad, adds=True)
        # Of several uses in one backward only the first overwrites. A reentrant checkpoint runs a
        # backward of its own, in which the first use overwrites as well.
        task = backward_id()
        before = getattr(weight, "_main_grad_written_in", None)
        weight._main_grad_written_in = task
        return Accumulator(main_grad, adds=task == before)

    def closed(self) -> Tensor | None:
        """Mark dweight as added; return what autograd gets, one expanded zero, copied later."""
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        zero = torch.zeros((), dtype=self.dtype, device=self.weight.device)
        return zero.expand(self.weight.shape)

    def zeros(self) -> Tensor:
        """Return what ``torch.autograd.grad`` does for weight: zeros that others may add to.

        Pipelines that make it their weight's ``grad`` add that of the next microbatch in place.
        """
        return torch.zeros(self.weight.shape, dtype=self.dtype, device=self.weight.device)

    def added(self, dweight: Tensor) -> Tensor | None:
        """Add a dweight [V, H] that exists already; return what autograd gets."""
        main_grad, accumulates = self.opened()
        if accumulates:
            main_grad += dweight
        else:
            main_grad.copy_(dweight)
        return self.closed()


def captured(weight: Tensor, call: Call) -> MainGrad:
    """Return the accumulator of the weight that the caller passed."""
    if isinstance(weight, DTensor):
        raise NotImplementedError(
            "accumulate_dweight=True needs a plain weight, got a DTensor: pass weight.to_local() "
            "with its main_grad, or accumulate_dweight=False"
        )
    buffer = None
    if not hasattr(weight, "get_main_grad"):
        buffer = getattr(weight, "main_grad", None)
        _check(buffer, weight, call.dtype)
    return MainGrad(weight, buffer, call.dtype)


def _check(main_grad: Any, weight: Tensor, dtype: torch.dtype) -> None:
    if main_grad is None:
        raise ValueError(
            "weight must have an attribute main_grad, [V, H], or get_main_grad, with "
            "accumulate_dweight=True (Megatron's gradient_accumulation_fusion, whose DDP sets it), "
            "got neither"
        )
    wide = torch.promote_types(dtype, torch.float32)
    check_tensor("weight.main_grad", main_grad, (wide, dtype), weight, "weight")
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"weight.main_grad must have weight's shape {tuple(weight.shape)}, "
            f"got {tuple(main_grad.shape)}"
        )
    row, column = main_grad.stride()
    V, H = main_grad.shape
    if (column != 1 and H > 1) or (row < H and V > 1) or main_grad.is_neg():
        kind = "a view of negated numbers" if main_grad.is_neg() else f"strides {(row, column)}"
        raise ValueError(
            "weight.main_grad must have contiguous rows that do not overlap, as [V, H] of a flat "
            f"buffer has, got {kind}"
        )
    if main_grad.requires_grad:
        raise ValueError("weight.main_grad must have requires_grad=False, got True")
