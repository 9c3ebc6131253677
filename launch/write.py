"""Files that others see whole, as they were before, or not at all; what fails is one line."""

import errno
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flce_dist.launch.program import RunError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """Raise ``RunError`` for an ``OSError`` while ``path`` is written, with ``needed`` bytes."""
    try:
        yield
    except OSError as error:
        there = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))
        reason: Any = error.strerror or error
        if there != path and not there.is_dir():
            reason = f"{there} is not a directory"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = f"{there} cannot be written: {reason}"
        elif there == path and error.errno == errno.EEXIST:
            reason = "it is there and is not a directory"
        elif needed is not None and error.errno in (None, errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(there).free
            reason = f"{reason}; it needs {needed} bytes, {free} are free"
        raise RunError(f"cannot write {path}: {reason}") from error


def with_suffix(stem: Path, suffix: str, option: str = "out") -> Path:
    """Append to a stem, whatever dots it holds; raise ``RunError`` for one without a name."""
    if stem.name in ("", ".."):
        raise RunError(f"{option} must end in a name, to which {suffix} is added, got {stem}")
    return stem.with_name(stem.name + suffix)


def check_writable(path: Path) -> None:
    """Raise ``RunError`` if ``path`` cannot be written, before work that would be lost."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_replaceable(path)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def _check_replaceable(path: Path) -> None:
    """Raise ``OSError`` for what is no file: a device would be gone, and a FIFO's reader wait."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file")


@contextmanager
def replacing(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yield a path to write to; it becomes ``path`` at the end, and is removed after an exception.

    Folders above are made. Whoever needs the content on disk first syncs it. Raises as ``writing``.
    """
    # Containers that share a folder may have equal process ids.
    scratch = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    with writing(path):
        _check_replaceable(path)
    with writing(path, needed):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield scratch
            scratch.rename(path)
        finally:
            scratch.unlink(missing_ok=True)


class _HashedFile(io.BufferedWriter):
    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "w"))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


def write_synced(path: Path, content: bytes | dict[str, Tensor]) -> dict[str, Any]:
    """Write bytes or tensors and wait until they are on disk; return their size and SHA-256."""
    with _HashedFile(path) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # behind which torch hides what ends a ``write``
                if isinstance(error.__context__, OSError | KeyboardInterrupt):
                    raise error.__context__ from None
                raise
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": file.sha256.hexdigest()}


def strict_json(value: Any, *, indent: int | None = 1) -> str:
    """Return ``value`` as JSON that any reader takes, with null for numbers that are not finite."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` in one step, or raise ``RunError``, as the functions below."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` by ``strict_json``."""
    write_text(path, strict_json(content) + "\n")


def write_figure(path: Path, figure: "Figure", dpi: int) -> None:
    """Replace ``path`` by a PNG."""
    with replacing(path) as scratch:
        figure.savefig(scratch, format="png", dpi=dpi)
