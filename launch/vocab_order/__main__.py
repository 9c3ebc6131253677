"""Make an order of the vocabulary, and give it to a checkpoint (docs/vocabulary_order.md).

    python -m flce_dist.launch.vocab_order count text.txt --out counts.npy
    python -m flce_dist.launch.vocab_order order counts.npy --out order.pt
    python -m flce_dist.launch.vocab_order convert rank0.pt rank1.pt --to ordered \\
        --order order.pt --out ordered

Each file is written whole or not at all.
"""

from flce_dist.launch.program import run_program  # isort: skip  # before other packages

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

from flce_dist.filtered import frequency_order
from flce_dist.filtered.vocab_order import MAP
from flce_dist.launch.vocab_order import files
from flce_dist.launch.yaml_config import ConfigError, read_utf8, require


@dataclass(frozen=True)
class Count:
    """Count the tokens of texts by Tekken's vocabulary of 131,072 entries."""

    texts: tyro.conf.Positional[tuple[Path, ...]]
    """UTF-8 files, a sample of the training text."""
    out: Path = Path("counts.npy")
    """Counts [V_all] int64: a file .npy, or .pt for torch.load."""


@dataclass(frozen=True)
class Order:
    """Make the order of token counts: tokens of like frequency share a tile of 256 rows."""

    counts: tyro.conf.Positional[Path]
    """Counts [V_all] of any real dtype, .npy or .pt."""
    out: Path = Path("order.pt")
    """The token of each row [V_all] int64, for torch.load and vocab_order=."""
    padded_vocab_size: int | None = None
    """Rows of the whole weight if they are more than V_all."""


@dataclass(frozen=True)
class Convert:
    """Move the rows of an output layer in state dicts into an order, or back."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Files of torch.save, each a dict of tensors by name: one, or those of all tensor-parallel
    ranks, each with its rows. Their names say the ranks: alike but for one number."""
    to: Literal["ordered", "plain"]
    """The order of --order, or the tokenizer's."""
    out: Path
    """Folder for the converted files, which keep their names."""
    order: Path | None = None
    """File of the order, for --to ordered. --to plain finds it in the checkpoint."""
    names: tuple[str, ...] = ("weight",)
    """Tensors whose rows move: weights, a tied embedding, optimizer state of these. A bias moves
    with the weight beside it."""
    map: str | None = None
    """Name of the tensor that says which order the rows have; by default row_of_token beside the
    first of the names."""


def main(args: list[str] | None = None) -> int:
    """Return 0 once the files are written."""
    program = "python -m flce_dist.launch.vocab_order"
    command: Count | Order | Convert = tyro.cli(
        Count | Order | Convert, prog=program, args=args, description=__doc__
    )
    run: Any = {Count: count, Order: order, Convert: convert}[type(command)]
    for path in run(command):
        print(path)
    return 0


def count(command: Count) -> list[Path]:
    """Write the counts; return their path, as ``order`` and ``convert`` do."""
    require(bool(command.texts), "texts must name at least one file, got none")
    files.check_outputs([command.out], command.texts)
    texts = [read_utf8(path, "texts") for path in command.texts]
    # Seconds, for which no error waits.
    from flce_dist.launch.train.data import encode, load_tokenizer

    tokenizer, _ = load_tokenizer()
    counts = np.zeros(tokenizer.n_words, dtype=np.int64)
    for text in texts:
        counts += np.bincount(encode(tokenizer, text), minlength=len(counts))
    if command.out.suffix != ".npy":
        return files.write_all({command.out: torch.from_numpy(counts)})
    np.save(buffer := io.BytesIO(), counts)
    return files.write_all({command.out: buffer.getvalue()})


def order(command: Order) -> list[Path]:
    files.check_outputs([command.out], [command.counts])
    counts = files.read_counts(command.counts)
    try:
        found = frequency_order(counts, padded_vocab_size=command.padded_vocab_size)
    except ValueError as error:
        raise ConfigError(f"{command.counts}: {error}") from error
    return files.write_all({command.out: found.token_of_row})


def convert(command: Convert) -> list[Path]:
    require(bool(command.files), "files must name at least one file, got none")
    paths = files.by_rank(command.files)
    outputs = [command.out / path.name for path in paths]
    files.check_outputs(outputs, [*paths, *([command.order] if command.order else [])])
    require(bool(command.names), "--names must name at least one tensor, got none")
    needs = "--to ordered needs --order, the file that the command order writes"
    require(command.to == "plain" or command.order is not None, needs)
    takes = f"--to plain takes the order from the checkpoint, got --order {command.order}"
    require(command.to == "ordered" or command.order is None, takes)
    order = None if command.order is None else files.read_order(command.order)
    states = [files.read_state(path) for path in paths]
    names = files.with_biases(command.names, states[0])
    prefix, dot, _ = names[0].rpartition(".")
    name_of_map = command.map or f"{prefix}{dot}{MAP}"
    try:
        if order is None:
            converted = files.plain(states, names, name_of_map)
        else:
            converted = files.ordered(states, names, name_of_map, order)
    except ValueError as error:
        raise ConfigError(f"{', '.join(map(str, paths))}: {error}") from error
    return files.write_all(dict(zip(outputs, converted, strict=True)))


if __name__ == "__main__":
    run_program(main)
