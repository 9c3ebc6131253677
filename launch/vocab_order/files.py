"""Files of counts, orders and state dicts, and the rows of these in an order of their own.

What is read is checked, and nothing in it is run. V_all = vocabulary; the rows of all ranks, a file
for each, are those of the whole weight, padding last.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flce_dist.filtered.vocab_order import VocabOrder, as_vocab_order
from flce_dist.launch.write import replacing, write_synced
from flce_dist.launch.yaml_config import ConfigError, require

State = dict[str, Tensor]


def read_counts(path: Path) -> Tensor:
    if path.suffix == ".npy":
        return _read(path, "an array of NumPy", lambda: torch.from_numpy(np.load(path)))
    return _load(path, Tensor, "a tensor")


def read_order(path: Path) -> VocabOrder:
    tokens = _load(path, Tensor, "a tensor")
    try:
        return as_vocab_order(tokens, tokens.numel())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_state(path: Path) -> State:
    """Return a state dict on the CPU."""
    return dict(_load(path, dict, "a dict of tensors by name"))


def _load(path: Path, kind: type, what: str) -> Any:
    load = partial(torch.load, path, map_location="cpu", weights_only=True)
    found = _read(path, "a file of torch.save", load)
    require(isinstance(found, kind), f"{path} must hold {what}, got {type(found).__name__}")
    return found


def _read(path: Path, kind: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever a file of another kind leads to
        first_line = str(error).split("\n")[0]
        raise ConfigError(f"{path} must be {kind}: {first_line}") from error


def by_rank(paths: Sequence[Path]) -> list[Path]:
    """Return the files of tensor-parallel ranks in the order of ranks, which their names say.

    A shell lists rank10.pt before rank2.pt, and nothing in the files tells ranks apart. Raises
    ``ConfigError`` if the names do not differ in one number that counts from 0 or from 1.
    """
    if len(paths) == 1:
        return list(paths)
    names = [path.name for path in paths]
    parts = [re.split(r"([0-9]+)", name) for name in names]
    differing = [i for i, found in enumerate(zip(*parts, strict=False)) if len(set(found)) > 1]
    if len(set(map(len, parts))) == 1 and len(differing) == 1 and differing[0] % 2:
        numbers = [int(found[differing[0]]) for found in parts]
        by_number = dict(zip(numbers, paths, strict=True))
        if sorted(by_number) in (list(range(len(paths))), list(range(1, len(paths) + 1))):
            return [by_number[number] for number in sorted(by_number)]
    raise ConfigError(
        "files must be named alike but for one number, the rank, counted from 0 or 1, such as "
        f"rank0.pt and rank1.pt; got {names}"
    )


def check_outputs(outputs: Sequence[Path], read: Sequence[Path]) -> None:
    """Raise ``ConfigError`` if writing ``outputs`` would replace a file that is ``read``."""
    for out, path in itertools.product(outputs, read):
        same = out.exists() and path.exists() and out.samefile(path)
        require(not same, f"--out must not replace {path}, which is read; got {out}")


def write_all(contents: dict[Path, Any]) -> list[Path]:
    """Write bytes, tensors and state dicts, and rename them once all are on disk; return the paths.

    Raises ``RunError`` if a file cannot be written; then none is there in part.
    """
    with ExitStack() as stack:
        for path, content in contents.items():
            write_synced(stack.enter_context(replacing(path)), content)
    return list(contents)


# --- rows


def with_biases(names: Sequence[str], state: State) -> tuple[str, ...]:
    """Return ``names``, and after each weight the bias beside it if the state has one."""
    found: list[str] = []
    for name in names:
        bias = f"{name.removesuffix('weight')}bias"
        found += [name, bias] if name.endswith("weight") and bias in state else [name]
    return tuple(dict.fromkeys(found))


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
