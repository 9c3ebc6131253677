"""The options of a call, each declared once: a field of ``LossOptions``, its type and range."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

Reduction = Literal["none", "sum", "mean"]
ScheduleName = Literal["auto", "recompute", "cached", "in_forward"]
Impl = Literal["triton", "eager"]
Over = Literal["vocabulary", "ids"]  # what scores at ids are normalised over

if TYPE_CHECKING:
    from flce_dist.core.call import UnsizedSchedule

ScheduleOption = Union[ScheduleName, "UnsizedSchedule"]
"""A name, or an object such as ``flce_dist.filtered.schedule`` returns."""

OWN_SUM: Any = "own"
"""A reduction that no user chooses: the sum over this rank's part of gathered tokens."""


class Range(NamedTuple):
    """The numbers that an option accepts, as error text and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


_LEAST, _LARGEST = 1.1754943508222875e-38, 3.4028234663852886e38  # normal numbers of fp32
NOT_ZERO = Range("that is finite and not 0 in fp32", lambda x: _LEAST <= abs(x) <= _LARGEST)
POSITIVE = Range("that is finite and above 0 in fp32", lambda x: _LEAST <= x <= _LARGEST)
NOT_NEGATIVE = Range("that is finite in fp32 and not negative", lambda x: 0.0 <= x <= _LARGEST)
UNIT = Range("within [0, 1]", lambda x: 0.0 <= x <= 1.0)
INT64 = Range("within [-2**63, 2**63)", lambda x: -(2**63) <= x < 2**63)
FIRST_TWO = Range("that is 0 or 1", lambda x: 0 <= x <= 1)
COUNT = Range("within [1, 2**63)", lambda x: 1 <= x < 2**63)


@dataclass(frozen=True)
class LossOptions:
    """The keywords of ``linear_cross_entropy``, explained there, but tensors and the group.

    ``with_metrics`` is no keyword: ``linear_cross_entropy_with_metrics`` sets it, and
    ``with_entropy`` of ``linear_logprob``.
    """

    reduction: Reduction = "mean"
    ignore_index: Annotated[int, INT64] = -100
    label_smoothing: Annotated[float, UNIT] = 0.0
    z_loss_weight: Annotated[float, NOT_NEGATIVE] = 0.0
    softcap: Annotated[float | None, POSITIVE] = None
    logit_scale: Annotated[float, NOT_ZERO] = 1.0
    vocab_size: Annotated[int | None, COUNT] = None
    vocab_range: tuple[int, int] | None = None
    sequence_parallel: bool = False
    sequence_dim: Annotated[int, FIRST_TWO] = 0
    reduce_dhidden: bool = True
    reduce_in_fp32: bool = False
    tp_invariant: bool = False
    accumulate_dweight: bool = False
    schedule: ScheduleOption = "auto"
    max_logits_bytes: Annotated[int | None, COUNT] = None
    max_counted: Annotated[int | None, COUNT] = None
    skip_ignored: bool = False
    impl: Impl | None = None
    with_metrics: bool = False  # set by linear_cross_entropy_with_metrics

    @property
    def partitions(self) -> bool:
        """Whether tokens that count are computed before others, or alone."""
        return self.skip_ignored or self.max_counted is not None

    @property
    def smoothing_needs_logits(self) -> bool:
        """Whether backward needs the logits for smoothing, whose gradient a softcap scales."""
        return self.label_smoothing != 0.0 and self.softcap is not None


class Declared(NamedTuple):
    """The values that a field of ``LossOptions`` or of a launcher's configuration accepts."""

    kind: type  # bool, int, float, tuple (of two ints), or str if there are choices
    optional: bool  # also accepts None
    choices: tuple[str, ...]
    range: Range | None

    @property
    def words(self) -> str:
        if self.choices:
            return f"one of {(*self.choices, None) if self.optional else self.choices}"
        words = "None or " if self.optional else ""
        words += {tuple: "(start, end)", int: "an int"}.get(self.kind, f"a {self.kind.__name__}")
        return words if self.range is None else f"{words} {self.range.words}"


def declared(hint: Any) -> Declared:
    limits = None
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = get_args(parts[0]) if get_origin(parts[0]) is Literal else ()
    kind = str if choices else get_origin(parts[0]) or parts[0]
    return Declared(kind, NoneType in parts, choices, limits)


DECLARED = {field.name: declared(field.type) for field in fields(LossOptions)}
KEYWORDS = tuple(name for name in DECLARED if name != "with_metrics")


def keywords_of(
    function: Callable[..., Any], given: Mapping[str, Any], **fixed: Any
) -> dict[str, Any]:
    """Return ``given`` and ``fixed``; raise Python's TypeError for other names, and fixed ones."""
    for name in given:
        if name not in KEYWORDS or name in fixed:
            allowed = {name for name in KEYWORDS if name not in fixed}
            parameters = inspect.signature(function).parameters.values()
            explicit = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
            close = difflib.get_close_matches(name, sorted(allowed | explicit), n=1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            what = f"got an unexpected keyword argument {name!r}"
            raise TypeError(f"{function.__qualname__}() {what}{hint}")
    return {**given, **fixed}
