"""What the caller asked for, as one frozen object that travels from api to kernels.

An option is declared once, as a field of ``LossOptions``: its type and, of a number, its range.
``checks`` judges values by these declarations, ``library`` makes its schema of them, and
``rank_check`` compares every field.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

Reduction = Literal["none", "sum", "mean"]
Schedule = Literal["auto", "recompute", "cached", "in_forward"]
Impl = Literal["triton", "eager"]


class Range(NamedTuple):
    """Which numbers an option may be: in the words of an error, and as a function."""

    words: str
    holds: Callable[[Any], bool]


_LEAST, _LARGEST = 1.1754943508222875e-38, 3.4028234663852886e38  # normal numbers of fp32
FINITE = Range("that is finite in fp32", lambda x: abs(x) <= _LARGEST)
NOT_ZERO = Range("that is finite and not 0 in fp32", lambda x: _LEAST <= abs(x) <= _LARGEST)
POSITIVE = Range("that is finite and above 0 in fp32", lambda x: _LEAST <= x <= _LARGEST)
UNIT = Range("within [0, 1]", lambda x: 0.0 <= x <= 1.0)
INT64 = Range("within [-2**63, 2**63)", lambda x: -(2**63) <= x < 2**63)
COUNT = Range("within [1, 2**63)", lambda x: 1 <= x < 2**63)


@dataclass(frozen=True)
class LossOptions:
    """Keywords of ``linear_cross_entropy`` other than tensors and the group.

    With logits ``z = softcap(logit_scale * (h . w) + b)``::

        loss = lse - (1 - label_smoothing) * z_y - label_smoothing / V_all * sum_v z_v
               + z_loss_weight * lse^2
    """

    reduction: Reduction = "mean"
    ignore_index: Annotated[int, INT64] = -100
    label_smoothing: Annotated[float, UNIT] = 0.0
    z_loss_weight: Annotated[float, FINITE] = 0.0
    softcap: Annotated[float | None, POSITIVE] = None
    logit_scale: Annotated[float, NOT_ZERO] = 1.0
    vocab_size: Annotated[int | None, COUNT] = None
    vocab_range: tuple[int, int] | None = None
    sequence_parallel: bool = False
    reduce_dhidden: bool = True
    reduce_in_fp32: bool = False
    tp_invariant: bool = False
    schedule: Schedule = "auto"
    max_logits_bytes: Annotated[int | None, COUNT] = None
    impl: Impl | None = None
    with_metrics: bool = False

    @property
    def smoothing_needs_logits(self) -> bool:
        """Whether the gradient of the smoothing term depends on each logit.

        Without a softcap that gradient is the same number for every column, a rank-1 term of
        ``dlogits``; with one it is that number times ``softcap'(z)`` and needs the logits again.
        """
        return self.label_smoothing != 0.0 and self.softcap is not None


class Declared(NamedTuple):
    """What a field of ``LossOptions``, or of a launcher's configuration, may hold."""

    kind: type  # bool, int, float, tuple of two ints, or str for one of the choices
    optional: bool  # None as well
    choices: tuple[str, ...]
    range: Range | None

    @property
    def words(self) -> str:
        """What is expected, as an error states it."""
        if self.choices:
            return f"one of {(*self.choices, None) if self.optional else self.choices}"
        words = "None or " if self.optional else ""
        words += {tuple: "(start, end)", int: "an int"}.get(self.kind, f"a {self.kind.__name__}")
        return words if self.range is None else f"{words} {self.range.words}"


def declared(hint: Any) -> Declared:
    """Read the annotation of a field."""
    limits = None
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = get_args(parts[0]) if get_origin(parts[0]) is Literal else ()
    kind = str if choices else get_origin(parts[0]) or parts[0]
    return Declared(kind, NoneType in parts, choices, limits)


DECLARED = {field.name: declared(field.type) for field in fields(LossOptions)}
