"""Rows of state dicts in an order of their own, and back; of one file, or of one for each rank.

V_all = vocabulary; the rows of all ranks are those of the whole weight, padding last.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_dist.filtered.vocab_order import VocabOrder, as_vocab_order

State = dict[str, Tensor]


def with_biases(names: Sequence[str], state: State) -> tuple[str, ...]:
    """Return ``names``, and after each weight the bias beside it if the state has one."""
    found: dict[str, None] = {}
    for name in names:
        found[name] = None
        prefix, _, last = name.rpartition("weight")
        if not last and f"{prefix}bias" in state:
            found[f"{prefix}bias"] = None
    return tuple(found)


def ordered(
    states: Sequence[State], names: Sequence[str], map_name: str, order: VocabOrder
) -> list[State]:
    """Move the rows of the tensors ``names`` into ``order``, and add its map to each state."""
    if any(map_name in state for state in states):
        raise ValueError(f"the rows have an order already ({map_name}); convert --to plain first")
    moved = _moved(states, names, order.token_of_row)
    return [{**state, map_name: order.row_of_token.clone()} for state in moved]


def plain(states: Sequence[State], names: Sequence[str], map_name: str) -> list[State]:
    """Move the rows back into the tokenizer's order, by the states' maps."""
    maps = [state.get(map_name) for state in states]
    first = maps[0]
    if not isinstance(first, Tensor) or any(x is None for x in maps):
        raise ValueError(f"the rows are in the tokenizer's order already: there is no {map_name}")
    if not all(torch.equal(x, first) for x in maps if x is not None):
        raise ValueError(f"{map_name} must be the same in all files, but they differ")
    row_of_token = as_vocab_order(first, first.numel()).token_of_row  # checked: a permutation
    moved = _moved(states, names, row_of_token)
    return [{name: x for name, x in state.items() if name != map_name} for state in moved]


def _moved(states: Sequence[State], names: Sequence[str], source: Tensor) -> list[State]:
    """Give the first rows of each tensor the rows ``source`` of it; padding stays."""
    result = [dict(state) for state in states]
    for name in names:
        shards = [state[name] for state in states if name in state]
        if len(shards) < len(states) or not all(torch.is_tensor(x) and x.dim() for x in shards):
            raise ValueError(
                f"there is no tensor {name} with rows; --names must name those to move"
            )
        rows, least = torch.cat(shards), len(source)
        if len(rows) < least:
            wanted = f"the {least} rows of the order or more"
            raise ValueError(f"{name} must have {wanted}, got {len(rows)}")
        rows[: len(source)] = rows[source]
        for state, shard in zip(result, rows.split([len(x) for x in shards]), strict=True):
            state[name] = shard.clone()
    return result
