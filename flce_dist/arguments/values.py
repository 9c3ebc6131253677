"""Checks of single values; errors name the argument, what is expected and what was given.

Each returns the value as Python's own type: numbers of numpy are as good, a bool or a tensor is no
number. With ``optional`` None is as good.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, get_args

import torch
from torch import Tensor

from flce_dist.arguments.options import Impl, LossOptions, Reduction, ScheduleName

_LEAST = torch.finfo(torch.float32).tiny  # normal numbers of fp32
_LARGEST = torch.finfo(torch.float32).max
_INT64 = 2**63
_LONGEST = 100  # characters of a value in an error


def checked(options: LossOptions) -> LossOptions:
    """Return the options, each value checked on its own."""
    schedule = options.schedule
    if not hasattr(schedule, "sized"):
        schedule = choice("schedule", schedule, get_args(ScheduleName))
    return LossOptions(
        reduction=choice("reduction", options.reduction, get_args(Reduction)),
        ignore_index=integer(
            "ignore_index", options.ignore_index, "within [-2**63, 2**63)", least=-(2**63)
        ),
        label_smoothing=fraction("label_smoothing", options.label_smoothing),
        z_loss_weight=not_negative("z_loss_weight", options.z_loss_weight),
        softcap=positive("softcap", options.softcap, optional=True),
        logit_scale=not_zero("logit_scale", options.logit_scale),
        vocab_size=count("vocab_size", options.vocab_size, optional=True),
        vocab_range=rows("vocab_range", options.vocab_range),
        sequence_parallel=flag("sequence_parallel", options.sequence_parallel),
        sequence_dim=integer(
            "sequence_dim", options.sequence_dim, "that is 0 or 1", least=0, end=2
        ),
        reduce_dhidden=flag("reduce_dhidden", options.reduce_dhidden),
        reduce_in_fp32=flag("reduce_in_fp32", options.reduce_in_fp32),
        tp_invariant=flag("tp_invariant", options.tp_invariant),
        accumulate_dweight=flag("accumulate_dweight", options.accumulate_dweight),
        schedule=schedule,
        max_logits_bytes=count("max_logits_bytes", options.max_logits_bytes, optional=True),
        max_counted=count("max_counted", options.max_counted, optional=True),
        skip_ignored=flag("skip_ignored", options.skip_ignored),
        impl=choice("impl", options.impl, (*get_args(Impl), None)),
        with_metrics=flag("with_metrics", options.with_metrics),
        data_parallel=flag("data_parallel", options.data_parallel),
    )


def flag(name: str, value: object, *, optional: bool = False) -> Any:
    if type(value) is not bool and not (value is None and optional):
        raise _refusal(name, "a bool", value, optional=optional)
    return value


def choice(name: str, value: object, choices: tuple[str | None, ...]) -> Any:
    if not (value is None or type(value) is str) or value not in choices:
        raise _refusal(name, f"one of {choices}", value)
    return value


def integer(
    name: str, value: object, words: str, *, least: int, end: int = _INT64, optional: bool = False
) -> Any:
    """Return an int within [least, end)."""
    if value is None and optional:
        return None
    converted = _int_of(value)
    if converted is None or not least <= converted < end:
        raise _refusal(name, f"an int {words}", value, optional=optional, number="int")
    return converted


def count(name: str, value: object, *, optional: bool = False) -> Any:
    return integer(name, value, "within [1, 2**63)", least=1, optional=optional)


def number(
    name: str, value: object, words: str, *, least: float, most: float, optional: bool = False
) -> Any:
    """Return a float within [least, most]."""
    if value is None and optional:
        return None
    converted = _float_of(value)
    if converted is None or not least <= converted <= most:
        raise _refusal(name, f"a float {words}", value, optional=optional, number="float")
    return converted


def fraction(name: str, value: object) -> Any:
    return number(name, value, "within [0, 1]", least=0.0, most=1.0)


def not_negative(name: str, value: object) -> Any:
    words = "that is finite in fp32 and not negative"
    return number(name, value, words, least=0.0, most=_LARGEST)


def positive(name: str, value: object, *, optional: bool = False) -> Any:
    words = "that is finite and above 0 in fp32"
    return number(name, value, words, least=_LEAST, most=_LARGEST, optional=optional)


def not_zero(name: str, value: object) -> Any:
    converted = _float_of(value)
    if converted is None or not _LEAST <= abs(converted) <= _LARGEST:
        raise _refusal(name, "a float that is finite and not 0 in fp32", value, number="float")
    return converted


def rows(name: str, value: object) -> Any:
    """Return (start, end), or None."""
    if value is None:
        return None
    ends = tuple(_int_of(x) for x in value) if isinstance(value, Sequence) else ()
    if len(ends) != 2 or None in ends:
        raise _refusal(name, "(start, end)", value, optional=True)
    return ends


def _refusal(
    name: str, expected: str, value: object, *, optional: bool = False, number: str = ""
) -> ValueError:
    """Return the error of a value; ``number`` makes the one of a tensor that holds it."""
    none = "None or " if optional else ""
    is_one = isinstance(value, Tensor) and not value.is_nested and value.numel() == 1
    way_out = f": pass {number}({name})" if number and is_one else ""
    return ValueError(f"{name} must be {none}{expected}, got {shown(value)}{way_out}")


def either(dtypes: Sequence[torch.dtype]) -> str:
    *others, last = dict.fromkeys(map(str, dtypes))
    return f"{', '.join(others)} or {last}" if others else last


def shape(*sizes: object) -> str:
    """Return a shape of numbers and names as an error shows it: (6, H)."""
    return f"({', '.join(map(str, sizes))})"


def shown(value: object) -> str:
    """Return how an error shows a value: of a tensor no elements, of others not much."""
    if isinstance(value, Tensor):
        kind = "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
        return f"{kind} and dtype {value.dtype}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _int_of(value: Any) -> Any:
    """Return the value as an int, or None; torch.compile's symbolic ones stay as they are."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


def _float_of(value: Any) -> float | None:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond fp64
        return None
