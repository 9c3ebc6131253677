"""Files of a checkpoint: hashed while they are written, and on disk when the call returns."""

import hashlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def digest(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.sha256()
        while block := file.read(1 << 20):
            sha256.update(block)
        return {"bytes": file.tell(), "sha256": sha256.hexdigest()}


class _HashedFile(io.BufferedWriter):
    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "w"))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


def write_synced(path: Path, content: bytes | dict[str, Tensor]) -> dict[str, Any]:
    """Write bytes or tensors and wait until they are on disk; return what ``digest`` would."""
    with _HashedFile(path) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # behind which torch hides an OSError of ``write``
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": file.sha256.hexdigest()}


def remove(path: Path) -> None:
    """Remove a directory, if it is there, so that a reader sees all of it or nothing."""
    if path.exists():
        old = path.with_suffix(".old")
        path.rename(old)
        shutil.rmtree(old)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
