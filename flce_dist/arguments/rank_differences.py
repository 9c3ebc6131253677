"""How the facts of ranks differ, and what an error says about that.  Communicates nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from flce_dist.arguments.options import LossOptions

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


def compare_calls(of_ranks: Sequence[Mapping[str, Any]], options: LossOptions) -> None:
    """Raise ``ValueError`` unless the ranks' ``facts_of_call`` are those of one call."""

    def part(name: str) -> list[Any]:
        return [facts[name] for facts in of_ranks]

    raise_if_any(  # a later difference may be a consequence of an earlier one
        differences(part("arguments"))
        or _seams(part("rows"))
        or differences(part("values"))
        or differences(part("plan"))
    )
    if options.vocab_range is None:
        _refuse_one_weight(part("weight"), options.group_name)


def differences(of_ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each fact that differs between ranks, with its values."""
    values = {name: [repr(facts[name]) for facts in of_ranks] for name in of_ranks[0]}
    return [f"{name} is {_on_ranks(x)}" for name, x in values.items() if len(set(x)) > 1]


def _on_ranks(values: Sequence[str]) -> str:
    """Return "A on rank 0 and B on ranks 1, 2" for the values of ranks 0, 1 and 2."""
    ranks_of: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(str(rank))
    return " and ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        for value, ranks in ranks_of.items()
    )


def raise_if_any(complaints: Sequence[str]) -> None:
    """Raise one ``ValueError`` for all of these, with a hint if there is one for the first."""
    if not complaints:
        return
    text = "; ".join(complaints)
    hints = (hint for name, hint in _HINTS.items() if f"{name} is" in text)
    hint = next(hints, None)
    raise ValueError(f"ranks must call alike: {text}" + (f"; {hint}" if hint else ""))


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
