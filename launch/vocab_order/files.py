"""Files of counts, orders and state dicts. What is read is checked, and nothing in it is run."""

import io
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flce_dist.launch.train.files import write_shard, write_synced
from flce_dist.launch.write import replacing
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.vocab_order import VocabOrder, as_vocab_order


def read_counts(path: Path) -> Tensor:
    if path.suffix != ".npy":
        return _tensor(path)
    try:
        return torch.from_numpy(np.load(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, EOFError) as error:
        raise ConfigError(f"{path} must be an array of NumPy: {error}") from error


def read_order(path: Path) -> VocabOrder:
    tokens = _tensor(path)
    try:
        return as_vocab_order(tokens, tokens.numel())
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_state(path: Path) -> dict[str, Tensor]:
    """Return a state dict on the CPU."""
    state = _loaded(path)
    if not isinstance(state, dict):
        raise ConfigError(f"{path} must hold a dict of tensors by name, got {type(state).__name__}")
    return dict(state)


def array_bytes(x: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, x)
    return buffer.getvalue()


def tensor_bytes(x: Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()


def write_all(contents: dict[Path, Any]) -> list[Path]:
    """Write bytes and state dicts, and rename them once all are on disk; return the paths.

    Raises:
        RunError: a file cannot be written. None is there in part.
    """
    with ExitStack() as stack:
        for path, content in contents.items():
            scratch = stack.enter_context(replacing(path))
            (write_synced if isinstance(content, bytes) else write_shard)(scratch, content)
    return list(contents)


def _tensor(path: Path) -> Tensor:
    x = _loaded(path)
    if not isinstance(x, Tensor):
        raise ConfigError(f"{path} must hold a tensor, got {type(x).__name__}")
    return x


def _loaded(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever a file of another kind leads to
        first_line = str(error).split("\n")[0]
        raise ConfigError(f"{path} must be a file of torch.save: {first_line}") from error
