"""Whether the ranks of a tensor-parallel group call alike, checked once, on request.

``linear_cross_entropy`` trusts that they do and does not check. Ranks that disagree wait for each
other until a timeout, or go on and compute a meaningless loss. Here each rank summarises what it
would call with, all ranks read all summaries, and so all reach the same verdict. A rank that could
not call at all sends its error instead, so that no rank waits for it.
"""

import ctypes
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.op import checks
from flce_dist.op.dtensor import localized
from flce_dist.op.prepare import Arguments, gradients_needed, in_autocast_dtype, prepare
from flce_dist.options import LossOptions, options_of
from flce_dist.parallel import collectives

_BYTES = 4096  # of each rank's summary: about 1 KiB of facts, and what the next line allows
_LONGEST = 1000  # characters of a plan or a complaint


def check_ranks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Check that all ranks of ``tp_group`` are about to call ``linear_cross_entropy`` alike.

    For the first step, with the arguments of the call to come, on every rank of the group; not for
    each step. It costs one all-gather of 4 KiB per rank, and the host waits for the device: labels,
    token_weight and a few rows of weight are read. Each label must be in range, on GPUs as well.

    Compared are the shape and dtype of hidden, the shape of labels, presence and dtype of bias and
    token_weight, the values of labels and token_weight, which operands need a gradient, every
    option, vocab_size, impl, and the plan. The ranks' rows of the vocabulary must follow one
    another without gap or overlap, and not be the same rows on all ranks: a whole weight on each
    would give a loss that is too high by log P. Not compared are the values of hidden.

    Args:
        hidden, weight, labels and all keywords: as for ``linear_cross_entropy``. Without a
            ``tp_group`` they are checked by themselves and nothing is sent.

    Raises:
        ValueError: the same one on every rank of the group. It names each argument that differs
            with its values and their ranks; or the neighbours whose rows do not meet; or the
            complaints of the ranks whose own arguments are wrong, whatever they raise; or that all
            ranks hold one weight. Labels, token_weight, rows, plan and weight are compared only if
            the arguments before them agree.
            Without a group, what ``linear_cross_entropy`` raises.
    """
    chosen = options_of(check_ranks, options)
    arguments = Arguments(hidden, weight, labels, bias, token_weight, chosen, tp_group)
    if not isinstance(tp_group, dist.ProcessGroup):
        _summary(arguments)
        return
    failure: Exception | None = None
    try:
        summary = _summary(arguments)
    except Exception as error:  # also those of Python for arguments of a wrong type
        failure, summary = error, {"error": f"{type(error).__name__}: {error}"[:_LONGEST]}
    complaint = _complaint(_gather(summary, hidden, tp_group))
    if complaint is not None:
        raise ValueError(complaint) from failure


def _summary(arguments: Arguments) -> dict[str, Any]:
    """Return what the other ranks must know of this one's call; raise if it would."""
    arguments = in_autocast_dtype(localized(arguments))
    needs = gradients_needed(arguments)
    call, (_, weight, _, labels, token_weight) = prepare(arguments, needs)
    labels, start = labels.cpu(), call.vocab_start_index
    end = start + len(weight)
    checks.check_labels(labels, call.vocab_size, call.options.ignore_index)
    counted = labels[labels != call.options.ignore_index]
    return {
        "arguments": _facts(arguments, call.options, needs),
        "rows": [min(row, call.vocab_size) for row in (start, end)],
        "values": {
            "hash of labels": _hash(labels),
            "hash of token_weight": None if token_weight is None else _hash(token_weight),
        },
        "plan": {"plan": repr(call.plan)[:_LONGEST]},
        "weight": {
            "rows": len(weight),
            "hash": _hash_of_rows(weight),
            "largest label": max(counted.tolist(), default=-1),
        },
    }


def _facts(arguments: Arguments, options: LossOptions, needs: list[bool]) -> dict[str, Any]:
    """Return what must be equal on all ranks. Each rank compares the rest with hidden itself."""
    hidden, bias, token_weight = arguments.hidden, arguments.bias, arguments.token_weight
    return {
        "hidden.shape": tuple(hidden.shape),
        "hidden.dtype": str(hidden.dtype),
        "labels.shape": tuple(arguments.labels.shape),
        "bias": None if bias is None else str(bias.dtype),
        "token_weight": None if token_weight is None else str(token_weight.dtype),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "hidden.requires_grad": needs[0],
        "weight.requires_grad": needs[1],
        "bias.requires_grad": needs[2],
        **{name: value for name, value in vars(options).items() if name != "vocab_range"},
        "impl": options.impl or ("triton" if hidden.is_cuda else "eager"),
    }


def _hash(x: Tensor) -> str:
    x = x.cpu().contiguous()
    return hashlib.blake2b(ctypes.string_at(x.data_ptr(), x.nbytes), digest_size=8).hexdigest()


def _hash_of_rows(weight: Tensor) -> str | None:
    """Return the hash of 16 rows spread over ``weight``, None where it proves nothing.

    Weights that are constant, such as zeros before a checkpoint is loaded, may be equal by right.
    """
    V = len(weight)
    if V == 0:
        return None
    sample = weight.detach()[torch.arange(16, device=weight.device) * V // 16]
    return None if (sample == sample[0, 0]).all() else _hash(sample)


def _gather(
    summary: dict[str, Any], hidden: Tensor, tp_group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Return every rank's summary, in rank order and as JSON leaves it; collective.

    It travels on the CPU if the group has a backend for that: a rank whose hidden is on another
    device than the others' must meet them all the same.
    """
    device = collectives.message_device(hidden, tp_group)
    text = json.dumps(summary, default=repr).encode()
    if len(text) > _BYTES:
        text = json.dumps({"error": f"a summary of {len(text)} bytes, over {_BYTES}"}).encode()
    mine = torch.tensor(list(text.ljust(_BYTES)), dtype=torch.uint8, device=device)
    everyone = mine.new_empty(collectives.group_size(tp_group) * _BYTES)
    collectives.all_gather(everyone, mine, group=tp_group)
    return [json.loads(bytes(row)) for row in everyone.view(-1, _BYTES).tolist()]


def _complaint(summaries: list[dict[str, Any]]) -> str | None:
    """Return what is wrong with the ranks' calls taken together; None if nothing is."""
    errors = [summary.get("error") for summary in summaries]
    if any(error is not None for error in errors):
        wrong = [f"{_ranks(r)}: {e}" for e, r in _groups(errors) if e is not None]
        return "ranks must call with valid arguments, got on " + "; on ".join(wrong)
    compare: Sequence[Callable[[list[dict[str, Any]]], list[str]]] = (
        lambda every: _differences([one["arguments"] for one in every]),
        _seams,
        lambda every: _differences([one["values"] for one in every]),
        lambda every: _differences([one["plan"] for one in every]),
    )
    # What comes later may differ only because of what came before.
    for found in (differences(summaries) for differences in compare):
        if found:
            return "ranks must call alike: " + "; ".join(found)
    return _one_weight([one["weight"] for one in summaries])


def _one_weight(weights: list[dict[str, Any]]) -> str | None:
    """Return a complaint if every rank holds the same rows, and labels speak for no others.

    Equal rows are not enough: a test may draw all shards from one seed.
    """
    first, P = weights[0], len(weights)
    V, label = first["rows"], first["largest label"]
    if P == 1 or first["hash"] is None or any(one != first for one in weights):
        return None
    if not 0 <= label < V:
        return None
    return (
        f"weight must be each rank's own rows of the vocabulary, got the same {V} rows on all {P} "
        f"ranks, and no label above {label}: pass to each rank its part of a whole weight, or "
        "tp_group=None; draw shards that are meant to differ from different seeds"
    )


def _differences(facts: list[dict[str, Any]]) -> list[str]:
    """Name each fact that is not the same on all ranks, with its values."""
    found = []
    for name in facts[0]:
        groups = _groups([one[name] for one in facts])
        if len(groups) > 1:
            values = " and ".join(f"{value!r} on {_ranks(ranks)}" for value, ranks in groups)
            found.append(f"{name} is {values}")
    return found


def _seams(summaries: list[dict[str, Any]]) -> list[str]:
    """Name each rank whose rows do not begin where those of the rank before it end.

    Each rank has made sure by itself that the first one's begin at 0 and the last one's reach
    vocab_size. Rows beyond that are padding and not among these: they may lie anywhere.
    """
    rows = [one["rows"] for one in summaries]
    return [
        f"vocabulary rows of rank {rank} must begin at {rows[rank - 1][1]}, where those of rank "
        f"{rank - 1} end, got {tuple(rows[rank])}"
        for rank in range(1, len(rows))
        if rows[rank][0] != rows[rank - 1][1]
    ]


def _groups(values: list[Any]) -> list[tuple[Any, list[int]]]:
    """Return the distinct values, each with the ranks that have it."""
    groups: list[tuple[Any, list[int]]] = []
    for rank, value in enumerate(values):
        for other, ranks in groups:
            if other == value:
                ranks.append(rank)
                break
        else:
            groups.append((value, [rank]))
    return groups


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
