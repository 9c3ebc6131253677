"""At a group's first call its ranks compare what they call with, and all raise if that differs.

Otherwise they would wait for each other until a timeout, or compute a meaningless loss.
"""

import ctypes
import hashlib
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.core.call import Call, Operands
from flce_dist.parallel.collectives import gather_tokens

_have_called: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

_OF_LABELS = (
    "labels are those of all tokens of tp_group, the same on its ranks: data-parallel ranks, over "
    "which FSDP2 shards parameters, are no tp_group, but the data_group of "
    "data_parallel_linear_cross_entropy"
)


def check_alike(call: Call, operands: Operands) -> None:
    """Compare a group's first call over its ranks: about 1 KiB from each, for which hosts wait.

    Compared are sizes, dtypes, options, which operands there are and which need a gradient; then
    whether the ranks' rows of the vocabulary meet; then the values of labels (or ids), token_weight
    and temperature; then the plan. If all ranks hold the same weight, each warns. Not in a capture,
    and not if all ranks have ``FLCE_DIST_CHECK_RANKS=0``.

    Raises:
        ValueError: the same on every rank; it names what differs, with values and their ranks.
    """
    group = call.tp_group
    if group is None or not _is_checked(group, operands.hidden):
        return
    _have_called.add(group)
    summaries: list[Any] = [None] * group.size()
    dist.all_gather_object(summaries, _summary(call, operands), group=group)
    arguments, rows, values, plans, weights = zip(*(one.values() for one in summaries), strict=True)
    # A later difference may be a consequence of an earlier one.
    found = _differences(arguments) or _seams(rows) or _differences(values) or _differences(plans)
    if found:
        text = "; ".join(found)
        hint = f"; {_OF_LABELS}" if "tokens is" in text or "labels is" in text else ""
        raise ValueError(f"ranks must call alike: {text}{hint}")
    _warn_of_one_weight(weights)


def check_lengths(labels: Tensor, group: dist.ProcessGroup | None) -> None:
    """Check at a group's first call that its data-parallel ranks have equally many labels."""
    if group is None or not _is_checked(group, labels):
        return
    mine = torch.full((1,), labels.numel(), device=labels.device)
    lengths = gather_tokens(mine, group).tolist()
    if len(set(lengths)) > 1:
        raise ValueError(
            "labels must be equally many on all ranks of data_group (pad with ignore_index), got "
            f"{lengths}"
        )


def _is_checked(group: dist.ProcessGroup, x: Tensor) -> bool:
    """Whether a call of the group is to be checked; x is on its device."""
    if group in _have_called or os.environ.get("FLCE_DIST_CHECK_RANKS", "1") == "0":
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _summary(call: Call, operands: Operands) -> dict[str, Any]:
    """Return this rank's facts about the call."""
    hidden, weight, bias, labels, token_weight, places, inverse, offsets, _ = operands
    options, start = call.options, call.vocab_start_index
    largest = int(labels.amax()) if labels.numel() else -1
    return {
        "arguments": {
            "hidden.shape": list(hidden.shape),
            "tokens": call.T_all,
            "dtype": str(call.dtype),
            "bias given": bias is not None,
            "token_weight given": token_weight is not None,
            "temperature given": inverse is not None,
            **{f"{name}.requires_grad": x for name, x in call.needs._asdict().items()},
            **{name: x for name, x in vars(options).items() if name != "vocab_range"},
            "vocab_range given": options.vocab_range is not None,
            "impl": call.impl,
        },
        "rows": [min(row, call.vocab_size) for row in (start, start + len(weight))],
        "values": {
            "hash of labels": _hash(labels, places, offsets),
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


def _differences(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return each fact that differs between ranks, with its values."""
    said = {name: [repr(one[name]) for one in facts] for name in facts[0]}
    return [f"{name} is {_on_ranks(x)}" for name, x in said.items() if len(set(x)) > 1]


def _on_ranks(values: Sequence[str]) -> str:
    """Return "A on rank 0 and B on ranks 1, 2" for the values of ranks 0, 1 and 2."""
    found: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(str(rank))
    return " and ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        for value, ranks in found.items()
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


def _warn_of_one_weight(weights: Sequence[tuple[int, str | None, int]]) -> None:
    """Warn if every rank holds the same rows and no label lies beyond them.

    Equal rows alone mean nothing: a test may initialise all shards from one seed.
    """
    V, rows, label = weights[0]
    if rows is None or len(set(weights)) > 1 or not 0 <= label < V:
        return
    warnings.warn(
        f"weight is the same {V} rows on all {len(weights)} ranks, and no label is above {label}: "
        "with the whole weight on each rank the loss is too high by log P; pass each its own rows "
        "of the vocabulary, or tp_group=None",
        stacklevel=2,
    )
