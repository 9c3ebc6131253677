"""What a field of a configuration accepts, read from its type: ``Annotated[int, SIZE]``."""

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import torch


class Range(NamedTuple):
    """The numbers that a field accepts, as error text and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


_LEAST = torch.finfo(torch.float32).tiny  # normal numbers of fp32
_LARGEST = torch.finfo(torch.float32).max

SIZE = Range("within [1, 2**31)", lambda x: 1 <= x < 2**31)
SIZE_OR_0 = Range("within [0, 2**31)", lambda x: 0 <= x < 2**31)
SEED = Range("within [0, 2**32)", lambda x: 0 <= x < 2**32)
POSITIVE = Range("that is finite and above 0 in fp32", lambda x: _LEAST <= x <= _LARGEST)
NOT_NEGATIVE = Range("that is finite and at least 0", lambda x: 0.0 <= x < float("inf"))
COUNT = Range("within [1, 2**63)", lambda x: 1 <= x < 2**63)
UNIT = Range("within [0, 1]", lambda x: 0.0 <= x <= 1.0)
BELOW_1 = Range("within [0, 1)", lambda x: 0.0 <= x < 1.0)
BETWEEN_0_AND_1 = Range("above 0 and below 1", lambda x: 0.0 < x < 1.0)


class Declared(NamedTuple):
    """The values that a field accepts."""

    kind: type  # bool, int, float, tuple, Path, or str if there are choices
    optional: bool  # also accepts None
    choices: tuple[str, ...]
    range: Range | None

    @property
    def words(self) -> str:
        words = "None or " if self.optional else ""
        words += "an int" if self.kind is int else f"a {self.kind.__name__}"
        return words if self.range is None else f"{words} {self.range.words}"


def declared(hint: Any) -> Declared:
    limits = None
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = get_args(parts[0]) if get_origin(parts[0]) is Literal else ()
    kind = str if choices else get_origin(parts[0]) or parts[0]
    return Declared(kind, NoneType in parts, choices, limits)
