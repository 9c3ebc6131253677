"""Files that are there: a FIFO, a socket or a device is none, since reading it may never end."""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, as the ``opener`` of ``open``; ``OSError`` for what is there and not regular.

    A directory is left to ``open``, which says what it is.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
    return os.open(path, flags, 0o666)


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; raise as ``regular``."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def digest(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a regular file, as ``write_synced`` does of its content."""
    with open(path, "rb", opener=regular) as file:
        sha256 = hashlib.sha256()
        while block := file.read(1 << 20):
            sha256.update(block)
        return {"bytes": file.tell(), "sha256": sha256.hexdigest()}


def parse_json(text: str | bytes) -> Any:
    """Return the value of ``text``, or raise ``ValueError``, of too many levels as well."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON of too many levels") from error
