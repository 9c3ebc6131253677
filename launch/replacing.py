"""A file that others see whole, as before, or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it becomes ``path`` at the end, and is removed after an exception.

    Folders above are made. Whoever needs the content on disk first syncs it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        scratch.rename(path)
    finally:
        scratch.unlink(missing_ok=True)
