"""At a function's first call with a group its ranks compare their arguments (``rank_facts``).

All raise if these differ, or if one rank refuses its own. Otherwise ranks would wait for each other
until a timeout, or compute a meaningless loss.
"""

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments.options import refuse_unknown
from flce_dist.arguments.rank_differences import compare_calls, differences, raise_if_any
from flce_dist.arguments.rank_facts import facts_of_call
from flce_dist.core.call import Call, Operands
from flce_dist.parallel.collectives import group_size

_P = ParamSpec("_P")
_R = TypeVar("_R")

_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
"""The functions that the ranks of a group have once called alike."""


class _Message(NamedTuple):
    """What a rank sends at a first call, about 1 KiB."""

    function: str
    refusal: str | None  # why this rank raises before it has facts
    facts: Mapping[str, Any]


def check_alike(
    function: str,
    call: Call,
    operands: Operands,
    *,
    low_rank_columns: int = 0,
    **more_values: Tensor | None,
) -> None:
    """Compare a function's first call with a group over its ranks; their hosts wait.

    Compared are sizes, dtypes, options, which operands there are and which need a gradient; then
    whether the ranks' rows of the vocabulary meet; then the values of labels (or ids), token_weight
    and temperature, and ``more_values``; then the plan. The last ``low_rank_columns`` of hidden and
    weight are not the caller's own. Not in a capture, and not if all ranks have
    ``FLCE_DIST_CHECK_RANKS=0``. What was refused is compared again at the next call.

    Raises:
        ValueError: the same on every rank; it names what differs, with values and their ranks. Or
            all ranks hold the same weight without vocab_range, and no label lies beyond it.
    """
    group = call.tp_group
    if group is None or not _is_first(function, group, operands.hidden):
        return
    facts = facts_of_call(function, call, operands, low_rank_columns, more_values)
    compare_calls(_facts_of_all(function, facts, group, operands.hidden), call.options)
    mark_alike(function, group)


def mark_alike(function: str, group: dist.ProcessGroup | None) -> None:
    """Do not compare calls of this function with this group any more."""
    if group is not None:
        _compared.setdefault(group, set()).add(function)


def check_facts(
    function: str, facts: Mapping[str, Any], group: dist.ProcessGroup | None, x: Tensor
) -> bool:
    """Compare what decides collectives without or before ``check_alike``; x is on their device.

    Return whether ranks have compared it now. Unless ``mark_alike`` follows they do so again.

    Raises:
        ValueError: the same on every rank; it names what differs, with values and their ranks.
    """
    if group is None or not _is_first(function, group, x):
        return False
    raise_if_any(differences(_facts_of_all(function, facts, group, x)))
    return True


def check_facts_once(
    function: str, facts: Mapping[str, Any], group: dist.ProcessGroup | None, x: Tensor
) -> None:
    """``check_facts`` of a function that compares nothing else, so not again with this group."""
    if check_facts(function, facts, group, x):
        mark_alike(function, group)


class refusals_told:  # not by contextlib, which takes the host longer
    """Where this rank raises in a block before it compares, the other ranks raise, too.

    At the function's first call with the group alone, as all comparisons; x is on its device.
    """

    def __init__(self, function: str, group: Any, x: Any) -> None:
        self._function = function
        self._group = group
        self._x = x

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            _tell_refusal(self._function, error, self._group, self._x)


def _tell_refusal(function: str, error: Exception, group: Any, x: Any) -> None:
    if isinstance(group, dist.ProcessGroup) and _is_first(function, group, x):
        _gathered(_Message(function, f"{type(error).__name__}: {error}", {}), group, x)


def told_if_unbound(function: Callable[_P, _R], calls: str | None = None) -> Callable[_P, _R]:
    """Decorate a function: where one rank's arguments do not fit its signature, all ranks raise.

    Its group is the parameter data_group or else tp_group, of a layer's method the layer's, and
    hidden is on the group's device. Of a group that this rank did not pass nobody is told. If a
    keyword is not one of ``function``, the error says which was meant. ``calls`` is the function
    that a method calls, in which the other ranks are.
    """
    parameters = inspect.signature(function).parameters
    binds = _binding_of(parameters)
    group_name = "data_group" if "data_group" in parameters else "tp_group"

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if binds(args, kwargs):
            return function(*args, **kwargs)
        passed = {**dict(zip(_positional(parameters), args, strict=False)), **kwargs}
        group = args[0].tp_group if calls else passed.get(group_name)  # type: ignore[attr-defined]
        with refusals_told(calls or function.__name__, group, passed.get("hidden")):
            if not _takes_any_keyword(parameters):
                refuse_unknown(function, kwargs)
            return function(*args, **kwargs)

    return call


def _binding_of(
    parameters: Mapping[str, inspect.Parameter],
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], bool]:
    """Return a function that tells whether arguments bind to these parameters.

    ``inspect.Signature.bind`` would take the host longer at each call.
    """
    names = frozenset(parameters)
    takes_any_keyword = _takes_any_keyword(parameters)
    positional = _positional(parameters)
    required = [name for name in positional if parameters[name].default is inspect.Parameter.empty]

    def binds(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return (
            len(args) <= len(positional)
            and all(name in kwargs for name in required[len(args) :])
            and not any(name in kwargs for name in positional[: len(args)])
            and (takes_any_keyword or names.issuperset(kwargs))
        )

    return binds


def _positional(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]


def _takes_any_keyword(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(x.kind is x.VAR_KEYWORD for x in parameters.values())


def _is_first(function: str, group: dist.ProcessGroup, x: Any) -> bool:
    """Whether the function's call is to be compared; x is on the group's device."""
    if torch.compiler.is_compiling() or function in _compared.get(group, ()):
        return False
    if os.environ.get("FLCE_DIST_CHECK_RANKS", "1") == "0":
        return False
    if isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return group_size(group) > 1


def _facts_of_all(
    function: str, facts: Mapping[str, Any], group: dist.ProcessGroup, x: Tensor
) -> list[Mapping[str, Any]]:
    """Return the facts of each rank; raise if some have none, or those of another function."""
    messages = _gathered(_Message(function, None, facts), group, x)
    refusals = [
        f"rank {rank} raised {message.refusal}"
        for rank, message in enumerate(messages)
        if message.refusal is not None
    ]
    functions = [{"function": message.function} for message in messages]
    raise_if_any(refusals or differences(functions))
    return [message.facts for message in messages]


def _gathered(message: _Message, group: dist.ProcessGroup, x: Any) -> list[_Message]:
    messages: list[Any] = [None] * group_size(group)
    with torch.cuda.device(x.get_device() if isinstance(x, Tensor) else -1):
        dist.all_gather_object(messages, tuple(message), group=group)
    return [_Message(*received) for received in messages]
