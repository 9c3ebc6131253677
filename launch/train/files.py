"""Files of a checkpoint: hashed while they are written, and on disk when the call returns."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor


def digest(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.sha256()
        while block := file.read(1 << 20):
            sha256.update(block)
        return {"bytes": file.tell(), "sha256": sha256.hexdigest()}


class _HashedFile:
    """What ``torch.save`` writes to. It hides an ``OSError``, so ``error`` keeps it."""

    def __init__(self, file: IO[bytes]):
        self.file, self.sha256, self.bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def write_shard(path: Path, state: dict[str, Tensor]) -> dict[str, Any]:
    """Write tensors and wait until they are on disk; return size and SHA-256 of the file."""
    with path.open("wb") as file:
        hashed = _HashedFile(file)
        try:
            torch.save(state, cast(IO[bytes], hashed))
        except RuntimeError:
            if hashed.error is not None:
                raise hashed.error from None
            raise
        os.fsync(file.fileno())
    return {"bytes": hashed.bytes, "sha256": hashed.sha256.hexdigest()}


def remove(path: Path) -> None:
    """Remove a directory, if it is there, so that a reader sees all of it or nothing."""
    if path.exists():
        old = path.with_suffix(".old")
        path.rename(old)
        shutil.rmtree(old)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
