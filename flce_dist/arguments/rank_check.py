"""At a function's first call with a group its ranks compare their arguments.

All raise if these differ. Otherwise ranks would wait for each other until a timeout, or compute a
meaningless loss.
"""

import ctypes
import functools
import hashlib
import inspect
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.arguments.options import refuse_unknown
from flce_dist.core.call import Call, Operands
from flce_dist.parallel.collectives import group_size

_P = ParamSpec("_P")
_R = TypeVar("_R")

_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
"""The functions that the ranks of a group have once called alike."""

_OF_LABELS = (
    "labels are those of all tokens of tp_group, the same on its ranks: data-parallel ranks, over "
    "which FSDP2 shards parameters, are no tp_group, but the data_group of "
    "data_parallel_linear_cross_entropy"
)
_HINTS = {  # after the first of these that differs
    "rows of weight": "uneven shards need vocab_range and vocab_size on all ranks",
    "tokens": _OF_LABELS,
    "hash of labels": _OF_LABELS,
    "number of labels": "pad labels with ignore_index to the same number on all ranks",
}
_NAMES_OF_LABELS = {"linear_logprob": "ids", "linear_sample": "counters"}
"""By the functions to which they are something else."""


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
    summary = _summary(call, operands, low_rank_columns, _NAMES_OF_LABELS.get(function, "labels"))
    summary["values"] |= {f"hash of {name}": _hash(x) for name, x in more_values.items()}
    facts = _facts_of_all(function, summary, group, operands.hidden)

    def of_ranks(name: str) -> list[Any]:
        return [of_rank[name] for of_rank in facts]

    _raise(  # a later difference may be a consequence of an earlier one
        _differences(of_ranks("arguments"))
        or _seams(of_ranks("rows"))
        or _differences(of_ranks("values"))
        or _differences(of_ranks("plan"))
    )
    if call.options.vocab_range is None:
        _refuse_one_weight(of_ranks("weight"), call.options.group_name)
    mark_alike(function, group)


def mark_alike(function: str, group: dist.ProcessGroup | None) -> None:
    """Do not compare calls of this function with this group any more."""
    if group is not None:
        _compared.setdefault(group, set()).add(function)


def check_facts(
    function: str, facts: Mapping[str, Any], group: dist.ProcessGroup | None, x: Tensor
) -> None:
    """Compare what decides collectives without or before ``check_alike``; x is on their device.

    Raises:
        ValueError: the same on every rank; it names what differs, with values and their ranks.
    """
    if group is not None and _is_first(function, group, x):
        _raise(_differences(_facts_of_all(function, facts, group, x)))


class refusals_told:
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
    """Where Python refuses one rank's arguments, a missing one or a keyword, all ranks raise.

    Of a keyword that ``function`` does not have the error says which was meant. Its group is the
    parameter data_group or else tp_group, of a layer's method the layer's, and hidden is on the
    group's device. A group that this rank did not pass is not known, so nobody is told. ``calls``
    is the function that a method calls, in which the other ranks are.
    """
    parameters = inspect.signature(function).parameters
    names = frozenset(parameters)
    kinds = [parameter.kind for parameter in parameters.values()]
    takes_any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
    positional = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    required = [name for name in positional if parameters[name].default is inspect.Parameter.empty]
    group_name = "data_group" if "data_group" in names else "tp_group"

    def binds(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return (
            len(args) <= len(positional)
            and all(name in kwargs for name in required[len(args) :])
            and not any(name in kwargs for name in positional[: len(args)])
            and (takes_any_keyword or names.issuperset(kwargs))
        )

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if binds(args, kwargs):
            return function(*args, **kwargs)
        passed = {**dict(zip(positional, args, strict=False)), **kwargs}
        group = args[0].tp_group if calls else passed.get(group_name)  # type: ignore[attr-defined]
        with refusals_told(calls or function.__name__, group, passed.get("hidden")):
            if not takes_any_keyword:
                refuse_unknown(function, kwargs)
            return function(*args, **kwargs)

    return call


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
    _raise(refusals or _differences([{"function": message.function} for message in messages]))
    return [message.facts for message in messages]


def _gathered(message: _Message, group: dist.ProcessGroup, x: Any) -> list[_Message]:
    messages: list[Any] = [None] * group_size(group)
    with torch.cuda.device(x.get_device() if isinstance(x, Tensor) else -1):
        dist.all_gather_object(messages, tuple(message), group=group)
    return [_Message(*received) for received in messages]


def _raise(differences: Sequence[str]) -> None:
    if not differences:
        return
    text = "; ".join(differences)
    hints = (hint for name, hint in _HINTS.items() if f"{name} is" in text)
    hint = next(hints, None)
    raise ValueError(f"ranks must call alike: {text}" + (f"; {hint}" if hint else ""))


def _summary(
    call: Call, operands: Operands, low_rank_columns: int, labels_are: str
) -> dict[str, Any]:
    """Return this rank's facts about the call, whose function calls its labels so."""
    hidden, weight, bias, labels, token_weight, _, inverse, offsets, *_ = operands
    options = call.options
    start = call.vocab_start_index
    T, columns = hidden.shape
    largest = int(labels.amax()) if labels.numel() else -1
    return {
        "arguments": {
            "hidden.shape": [T, columns - low_rank_columns],
            "tokens": call.T_all,
            "dtype": str(call.dtype),
            "bias given": bias is not None,
            "columns of low_rank": low_rank_columns,
            "low_rank trained alone": operands.last_columns is not None,
            "token_weight given": token_weight is not None,
            "temperature given": inverse is not None,
            **{f"{name}.requires_grad": x for name, x in call.needs._asdict().items()},
            **{name: x for name, x in vars(options).items() if name != "vocab_range"},
            "vocab_range given": options.vocab_range is not None,
            "impl": call.impl,
            "rows of weight": len(weight) if options.vocab_range is None else None,
        },
        "rows": [min(row, call.vocab_size) for row in (start, start + len(weight))],
        "values": {
            f"hash of {labels_are}": _hash(labels, offsets),
            "hash of token_weight": _hash(token_weight),
            "hash of temperature": _hash(inverse),
        },
        "plan": {"plan": repr(call.schedule)},
        "weight": (len(weight), _hash_of_rows(weight), largest),
    }


def _hash(*tensors: Tensor | None) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for x in (x.cpu().contiguous() for x in tensors if x is not None):
        digest.update(ctypes.string_at(x.data_ptr(), x.nbytes))
    return digest.hexdigest()


def _hash_of_rows(weight: Tensor) -> str | None:
    """Return the hash of 16 rows spread over ``weight``; None if all elements are equal.

    Constant shards, such as zeros before a checkpoint is loaded, are legitimately the same.
    """
    V = len(weight)
    if V == 0:
        return None
    sample = weight.detach()[torch.arange(16, device=weight.device) * V // 16]
    return None if (sample == sample[0, 0]).all() else _hash(sample)


def _differences(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each fact that differs between ranks, with its values."""
    of_ranks = {name: [repr(of_rank[name]) for of_rank in facts] for name in facts[0]}
    return [f"{name} is {_on_ranks(x)}" for name, x in of_ranks.items() if len(set(x)) > 1]


def _on_ranks(values: Sequence[str]) -> str:
    """Return "A on rank 0 and B on ranks 1, 2" for the values of ranks 0, 1 and 2."""
    ranks_of: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(str(rank))
    return " and ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        for value, ranks in ranks_of.items()
    )


def _seams(rows: Sequence[list[int]]) -> list[str]:
    """Return each rank whose rows below vocab_size do not begin where the previous rank's end.

    The first rank has checked that its rows begin at 0, the last that they reach vocab_size.
    """
    return [
        f"vocabulary rows of rank {rank} must begin at {end}, where those of rank {rank - 1} end, "
        f"got {tuple(rows[rank])}"
        for rank, (_, end) in enumerate(rows[:-1], start=1)
        if rows[rank][0] != end
    ]


def _refuse_one_weight(weights: Sequence[tuple[int, str | None, int]], group_name: str) -> None:
    """Raise if every rank holds the same rows and no label lies beyond them."""
    V, rows, label = weights[0]
    if rows is None or len(set(weights)) > 1 or not 0 <= label < V:
        return
    raise ValueError(
        f"weight must be each rank's own rows of the vocabulary, got the same {V} rows on all "
        f"{len(weights)} ranks, and no label above {label}: with the whole weight on each rank the "
        f"loss would be too high by log P; cut it, or pass {group_name}=None. If the ranks' own "
        "rows are equal on purpose, say so: pass each its vocab_range, and vocab_size"
    )
