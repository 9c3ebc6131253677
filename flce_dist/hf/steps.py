"""What a model may do to logits before its loss, as the cross entropy of unmade logits has it.

z = softcap(scale * h . w), where softcap(y) is c tanh(y / c); the bias goes with scale. One row of
``STEPS`` for each function, by the name of the function:

| function                  | of z                         | scale, c           |
|---------------------------|------------------------------|--------------------|
| product with k > 0        | k z                          | k scale, k c       |
| quotient by k > 0         | z / k                        | scale / k, c / k   |
| tanh, if not yet capped   | tanh(z)                      | scale, 1           |
| float, to, contiguous     | z; the loss is of fp32       | the same           |
| view, reshape, flatten    | the same rows, in one order  | the same           |
| index of leading places   | fewer rows                   | the same           |

A product of a capped z scales both: k c tanh(y / c) is c' tanh(k y / c') with c' = k c.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Formula:
    """Logits as the loss needs them: of which rows of hidden, and with which scale and softcap."""

    scale: float = 1.0
    softcap: float | None = None
    indices: tuple[Any, ...] = ()  # of leading places, one after the other
    is_reshaped: bool = False

    def times(self, factor: float) -> "Formula":
        softcap = None if self.softcap is None else self.softcap * factor
        return replace(self, scale=self.scale * factor, softcap=softcap)

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the rows [..., H] of ``hidden`` [..., H] whose logits these are."""
        for index in self.indices:
            hidden = hidden[index]
        return hidden


_FP32 = torch.finfo(torch.float32)

Step = Callable[[Formula, Tensor, list[Any]], Formula | None]
"""Takes the formula, the logits (without values) and the function's other arguments."""


def _product(formula: Formula, logits: Tensor, others: list[Any]) -> Formula | None:
    return _scaled(formula, others[0]) if _is_positive(others) else None


def _quotient(formula: Formula, logits: Tensor, others: list[Any]) -> Formula | None:
    return _scaled(formula, 1 / others[0]) if _is_positive(others) else None


def _scaled(formula: Formula, factor: float) -> Formula | None:
    """A scale and a softcap that fp32 does not hold are none of the loss."""
    scaled = formula.times(factor)
    factors = [x for x in (scaled.scale, scaled.softcap) if x is not None]
    return scaled if all(_FP32.tiny <= x <= _FP32.max for x in factors) else None


def _is_positive(others: list[Any]) -> bool:
    return len(others) == 1 and type(others[0]) in (int, float) and others[0] > 0


def _tanh(formula: Formula, logits: Tensor, others: list[Any]) -> Formula | None:
    return replace(formula, softcap=1.0) if formula.softcap is None else None


def _same(formula: Formula, logits: Tensor, others: list[Any]) -> Formula | None:
    return None if others else formula


def _to(formula: Formula, logits: Tensor, others: list[Any]) -> Formula | None:
    """A device stays what it is: only hidden's own is a step."""
    are_steps = [
        x.is_floating_point if isinstance(x, torch.dtype) else x == logits.device for x in others
    ]
    return formula if others and all(are_steps) else None


def _reshaped(formula: Formula, logits: Tensor, others: list[Any]) -> Formula | None:
    """Rows stay rows if the last size does; -1 may stand for another one alone."""
    sizes = others[0] if len(others) == 1 and isinstance(others[0], (tuple, list)) else others
    keeps_rows = len(sizes) > 1 and sizes[-1] == logits.shape[-1]
    return replace(formula, is_reshaped=True) if keeps_rows else None


def _flattened(formula: Formula, logits: Tensor, others: list[Any]) -> Formula | None:
    keeps_rows = len(others) == 2 and others[1] in (-2, logits.dim() - 2)
    return replace(formula, is_reshaped=True) if keeps_rows else None


def _indexed(formula: Formula, logits: Tensor, others: list[Any]) -> Formula | None:
    """Numbers and slices of leading places; the vocabulary stays whole."""
    index = others[0] if isinstance(others[0], tuple) else (others[0],)
    if formula.is_reshaped or any(type(x) not in (int, slice, type(...)) for x in index):
        return None
    if ... in index:
        place = index.index(...)
        missing = logits.dim() - (len(index) - 1)
        index = (*index[:place], *[slice(None)] * missing, *index[place + 1 :])
    if len(index) == logits.dim() and index[-1] == slice(None):
        index = index[:-1]
    if len(index) >= logits.dim():
        return None
    return replace(formula, indices=(*formula.indices, index))


STEPS: dict[str, Step] = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _product),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _quotient),
    "tanh": _tanh,
    **dict.fromkeys(("float", "contiguous"), _same),
    "to": _to,
    **dict.fromkeys(("view", "reshape"), _reshaped),
    "flatten": _flattened,
    "__getitem__": _indexed,
}
