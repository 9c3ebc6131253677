"""Check on request that the ranks of a tensor-parallel group make the same call.

If they do not, they wait for each other until a timeout or compute a meaningless loss. Each rank
sends a summary of its arguments, or its error if they are wrong, and all ranks draw one conclusion.
"""

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.op import checks
from flce_dist.op.dtensor import localized
from flce_dist.op.main_grad import captured
from flce_dist.op.prepare import Arguments, prepare, settled
from flce_dist.options import keywords_of


def check_ranks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """Check that all ranks of ``tp_group`` will make the same ``linear_cross_entropy`` call.

    Call it on every rank of the group before the first step. It gathers about 1 KiB from each
    rank, and the host waits for the device to read labels, token_weight, temperature and a few
    rows of weight. Labels must be in range, on GPUs too.

    It compares the shape and dtype of hidden, the shape of labels, presence and dtype of bias,
    token_weight and temperature, the values of labels and the latter two, which operands need a
    gradient, all options and the plan. The ranks' rows of the vocabulary must follow one another
    without gap or overlap. They must not be the same on all ranks: with the whole weight on each
    the loss is too high by log P. The values of hidden are not compared.

    Args:
        hidden, weight, labels, bias, token_weight, temperature, tp_group, **options: all that is
            passed to ``linear_cross_entropy``. Without a ``tp_group`` nothing is communicated but a
            weight that FSDP2 has sharded, and only these arguments are checked.

    Raises:
        ValueError: the same on every rank of the group. It names each argument that differs, with
            its values and their ranks; or neighbours whose rows do not meet; or the errors of ranks
            whose own arguments are wrong; or says that all ranks hold the same weight. Rows, values
            of labels, token_weight and temperature, plan and weight are compared in this order, and
            only if what comes before agrees.
            Without a group, what ``linear_cross_entropy`` raises.
    """
    group = tp_group if isinstance(tp_group, dist.ProcessGroup) else None
    failure: Exception | None = None
    try:
        chosen = checks.checked_options(**keywords_of(check_ranks, options))
        mine = _summary(
            Arguments(hidden, weight, labels, bias, token_weight, temperature, chosen, tp_group)
        )
    except Exception as error:  # of any type, for example TypeError for a wrong argument
        if group is None:
            raise
        failure, mine = error, {"error": f"{type(error).__name__}: {error}"}
    if group is None:
        return
    summaries: list[Any] = [None] * group.size()
    # NCCL sends from the current GPU.
    with torch.cuda.device_of(hidden if isinstance(hidden, Tensor) else torch.empty(0)):
        dist.all_gather_object(summaries, mine, group=group)
    complaint = _complaint(summaries)
    if complaint is not None:
        raise ValueError(complaint) from failure


def _summary(arguments: Arguments) -> dict[str, Any]:
    """Return this rank's facts about the call; raise if the call would."""
    given, arguments = arguments.weight, localized(arguments)
    options, (arguments, needs) = arguments.options, settled(arguments)
    call, (_, weight, _, labels, token_weight, _, inverse, *_) = prepare(arguments, needs)
    if needs[1] and options.accumulate_dweight:
        captured(given, call)
    labels, start = labels.cpu(), call.vocab_start_index
    on_cpu = None if token_weight is None else token_weight.cpu()
    checks.check_labels(labels, on_cpu, call.vocab_size, options)
    counted = labels[labels != options.ignore_index]
    dtypes = [None if x is None else str(x.dtype) for x in arguments[:6]]
    return {
        "arguments": {  # each rank has checked that its other tensors fit hidden
            "hidden.shape": list(arguments.hidden.shape),
            "hidden.dtype": dtypes[0],
            "labels.shape": list(arguments.labels.shape),
            "bias": dtypes[3],
            "token_weight": dtypes[4],
            "temperature": dtypes[5],
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "hidden.requires_grad": needs[0],
            "weight.requires_grad": needs[1],
            "bias.requires_grad": needs[2],
            **{name: value for name, value in vars(options).items() if name != "vocab_range"},
            "vocab_range given": options.vocab_range is not None,
            "impl": call.impl,
        },
        "rows": [min(row, call.vocab_size) for row in (start, start + len(weight))],
        "values": {
            "hash of labels": hash_of(labels),
            "hash of token_weight": None if token_weight is None else hash_of(token_weight),
            "hash of temperature": None if inverse is None else hash_of(inverse),
        },
        "plan": {"plan": repr(call.schedule)},
        "weight": (len(weight), _hash_of_rows(weight), max(counted.tolist(), default=-1)),
    }


def hash_of(x: Tensor) -> str:
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
    return None if (sample == sample[0, 0]).all() else hash_of(sample)


def _complaint(summaries: list[dict[str, Any]]) -> str | None:
    """Return the error text for the ranks' calls, or None."""
    errors = _by_value(summary.get("error") for summary in summaries)
    wrong = [f"{ranks}: {error}" for error, ranks in errors.items() if error is not None]
    if wrong:
        return "ranks must call with valid arguments, got on " + "; on ".join(wrong)
    arguments, rows, values, plan, weights = zip(*(one.values() for one in summaries), strict=True)
    # A later difference may be a consequence of an earlier one.
    found = _differences(arguments) or _seams(rows) or _differences(values) or _differences(plan)
    if found:
        return "ranks must call alike: " + "; ".join(found)
    return _one_weight(weights)


def _differences(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return each fact that differs between ranks, with its values."""
    said = {name: [repr(one[name]) for one in facts] for name in facts[0]}
    return [f"{name} is {on_ranks(x)}" for name, x in said.items() if len(set(x)) > 1]


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


def _one_weight(weights: Sequence[tuple[int, str | None, int]]) -> str | None:
    """Return an error text if every rank holds the same rows and no label lies beyond them.

    Equal rows alone are no error: a test may initialise all shards from one seed.
    """
    V, rows, label = weights[0]
    if len(weights) == 1 or rows is None or len(set(weights)) > 1 or not 0 <= label < V:
        return None
    return (
        f"weight must be each rank's own rows of the vocabulary, got the same {V} rows on all "
        f"{len(weights)} ranks, and no label above {label}: pass each rank its part of the whole "
        "weight, or tp_group=None; initialise different shards from different seeds"
    )


def on_ranks(values: Iterable[str]) -> str:
    """Return "A on rank 0 and B on ranks 1, 2" for the values of ranks 0, 1 and 2."""
    return " and ".join(f"{value} on {ranks}" for value, ranks in _by_value(values).items())


def _by_value(values: Iterable[str | None]) -> dict[str | None, str]:
    """Return each distinct value with its ranks, as "rank 0" or "ranks 1, 2"."""
    found: dict[str | None, list[str]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(str(rank))
    return {
        value: f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for value, ranks in found.items()
    }
