"""Check on request that the ranks of a tensor-parallel group make the same call.

``linear_cross_entropy`` checks this of the labels of a group's first call alone. If ranks disagree,
they wait for each other until a timeout or compute a meaningless loss. Here each rank sends a
summary of its arguments to all ranks, and every rank draws the same conclusion from all summaries.
A rank whose own arguments are wrong sends its error, so no rank waits for it.
"""

import ctypes
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.op import checks
from flce_dist.op.dtensor import localized
from flce_dist.op.main_grad import captured
from flce_dist.op.prepare import (
    Arguments,
    gradients_needed,
    in_autocast_dtype,
    prepare,
    sequence_first,
)
from flce_dist.options import LossOptions, options_of


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
    """Check that all ranks of ``tp_group`` will make the same ``linear_cross_entropy`` call.

    Call it on every rank of the group before the first step. It gathers about 1 KiB from each
    rank, and the host waits for the device to read labels, token_weight and a few rows of weight.
    Labels must be in range, on GPUs too.

    It compares the shape and dtype of hidden, the shape of labels, presence and dtype of bias and
    token_weight, the values of labels and token_weight, which operands need a gradient, all options
    and the plan. The ranks' rows of the vocabulary must follow one another without gap or overlap.
    They must not be the same on all ranks: with the whole weight on each the loss is too high by
    log P. The values of hidden are not compared.

    Args:
        hidden, weight, labels, bias, token_weight, tp_group, **options: all that is passed to
            ``linear_cross_entropy``. Without a ``tp_group`` nothing is communicated, and only these
            arguments are checked.

    Raises:
        ValueError: the same on every rank of the group. It names each argument that differs, with
            its values and their ranks; or neighbours whose rows do not meet; or the errors of ranks
            whose own arguments are wrong; or says that all ranks hold the same weight. Rows, values
            of labels and token_weight, plan and weight are compared in this order, and only if what
            comes before agrees.
            Without a group, what ``linear_cross_entropy`` raises.
    """

    def mine() -> dict[str, Any]:
        chosen = options_of(check_ranks, options)
        return _summary(Arguments(hidden, weight, labels, bias, token_weight, chosen, tp_group))

    if not isinstance(tp_group, dist.ProcessGroup):
        mine()
        return
    failure: Exception | None = None
    try:
        summary = mine()
    except Exception as error:  # of any type, for example TypeError for a wrong argument
        failure, summary = error, {"error": f"{type(error).__name__}: {error}"}
    summaries: list[Any] = [None] * tp_group.size()
    # NCCL sends from the current GPU.
    with torch.cuda.device_of(hidden if isinstance(hidden, Tensor) else torch.empty(0)):
        dist.all_gather_object(summaries, summary, group=tp_group)
    complaint = _complaint(summaries)
    if complaint is not None:
        raise ValueError(complaint) from failure


def _summary(arguments: Arguments) -> dict[str, Any]:
    """Return this rank's facts about the call; raise if the call would."""
    given = arguments.weight
    arguments = arguments._replace(options=checks.check_options(arguments.options))
    arguments = in_autocast_dtype(localized(arguments))
    sequence_dim = arguments.options.sequence_dim
    arguments = sequence_first(arguments)
    needs = gradients_needed(arguments)
    call, (_, weight, _, labels, token_weight) = prepare(arguments, needs)
    if needs[1] and call.options.accumulate_dweight:
        captured(given, call)
    labels, start = labels.cpu(), call.vocab_start_index
    end = start + len(weight)
    checks.check_labels(labels, call.vocab_size, call.options.ignore_index)
    counted = labels[labels != call.options.ignore_index]
    return {
        "arguments": _facts(arguments, replace(call.options, sequence_dim=sequence_dim), needs),
        "rows": (min(start, call.vocab_size), min(end, call.vocab_size)),
        "values": {
            "hash of labels": _hash(labels),
            "hash of token_weight": None if token_weight is None else _hash(token_weight),
        },
        "plan": {"plan": repr(call.schedule)},
        "weight": {
            "rows": len(weight),
            "hash": _hash_of_rows(weight),
            "largest label": max(counted.tolist(), default=-1),
        },
    }


def _facts(arguments: Arguments, options: LossOptions, needs: list[bool]) -> dict[str, Any]:
    """Return what must be equal on all ranks. Each rank has checked its tensors against hidden."""
    hidden, bias, token_weight = arguments.hidden, arguments.bias, arguments.token_weight
    return {
        "hidden.shape": list(hidden.shape),
        "hidden.dtype": str(hidden.dtype),
        "labels.shape": list(arguments.labels.shape),
        "bias": None if bias is None else str(bias.dtype),
        "token_weight": None if token_weight is None else str(token_weight.dtype),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "hidden.requires_grad": needs[0],
        "weight.requires_grad": needs[1],
        "bias.requires_grad": needs[2],
        **{name: value for name, value in vars(options).items() if name != "vocab_range"},
        "vocab_range given": options.vocab_range is not None,
        "impl": options.impl or ("triton" if hidden.is_cuda else "eager"),
    }


def _hash(x: Tensor) -> str:
    x = x.cpu().contiguous()
    return hashlib.blake2b(ctypes.string_at(x.data_ptr(), x.nbytes), digest_size=8).hexdigest()


def _hash_of_rows(weight: Tensor) -> str | None:
    """Return the hash of 16 rows spread over ``weight``; None if all elements are equal.

    Constant shards, such as zeros before a checkpoint is loaded, are legitimately the same.
    """
    V = len(weight)
    if V == 0:
        return None
    sample = weight.detach()[torch.arange(16, device=weight.device) * V // 16]
    return None if (sample == sample[0, 0]).all() else _hash(sample)


def _complaint(summaries: list[dict[str, Any]]) -> str | None:
    """Return the error text for the ranks' calls, or None."""
    errors = _groups(summary.get("error") for summary in summaries)
    wrong = [f"{_ranks(ranks)}: {error}" for error, ranks in errors.items() if error is not None]
    if wrong:
        return "ranks must call with valid arguments, got on " + "; on ".join(wrong)
    # A later difference may be a consequence of an earlier one.
    for name, differences in (
        ("arguments", _differences),
        ("rows", _seams),
        ("values", _differences),
        ("plan", _differences),
    ):
        found = differences([one[name] for one in summaries])
        if found:
            return "ranks must call alike: " + "; ".join(found)
    return _one_weight([one["weight"] for one in summaries])


def _one_weight(weights: list[dict[str, Any]]) -> str | None:
    """Return an error text if every rank holds the same rows and no label lies beyond them.

    Equal rows alone are no error: a test may initialise all shards from one seed.
    """
    first, P = weights[0], len(weights)
    V, label = first["rows"], first["largest label"]
    if P == 1 or first["hash"] is None or any(one != first for one in weights):
        return None
    if not 0 <= label < V:
        return None
    return (
        f"weight must be each rank's own rows of the vocabulary, got the same {V} rows on all {P} "
        f"ranks, and no label above {label}: pass each rank its part of the whole weight, or "
        "tp_group=None; initialise different shards from different seeds"
    )


def _differences(facts: list[dict[str, Any]]) -> list[str]:
    """Return each fact that differs between ranks, with its values."""
    found = []
    for name in facts[0]:
        values = [repr(one[name]) for one in facts]
        if len(set(values)) > 1:
            found.append(f"{name} is {on_ranks(values)}")
    return found


def on_ranks(values: Iterable[str]) -> str:
    """Return "A on rank 0 and B on ranks 1, 2" for the values of ranks 0, 1 and 2."""
    groups = _groups(values)
    return " and ".join(f"{value} on {_ranks(ranks)}" for value, ranks in groups.items())


def _seams(rows: list[tuple[int, int]]) -> list[str]:
    """Return each rank whose rows do not begin where those of the previous rank end.

    The first rank has checked that its rows begin at 0, the last that its rows reach vocab_size.
    Padding beyond vocab_size is not included and may lie anywhere.
    """
    return [
        f"vocabulary rows of rank {rank} must begin at {rows[rank - 1][1]}, where those of rank "
        f"{rank - 1} end, got {rows[rank]}"
        for rank in range(1, len(rows))
        if rows[rank][0] != rows[rank - 1][1]
    ]


def _groups(values: Iterable[str | None]) -> dict[str | None, list[int]]:
    """Return each distinct value with its ranks."""
    groups: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
