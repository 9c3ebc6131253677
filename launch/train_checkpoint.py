"""Checkpoints that are whole or not there: written aside, verified by checksums, then renamed.

A checkpoint is a directory ``step-00000050`` with one shard per rank
(torch.distributed.checkpoint) and ``manifest.json``: the step, the position in the data, the
configuration, and size and SHA-256 of each file. A process killed at any moment leaves at most
directories ``.tmp`` (being written) and ``.old`` (being removed), which the next start removes. The
directory must be shared by all ranks.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Position:
    """Where a run stands. ``step`` updates are done and ``samples`` sequences were read."""

    step: int
    samples: int
    config: dict[str, Any]
    """The run's configuration, flat."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    position: Position


def save(directory: Path, position: Position, state: dict[str, Any], *, keep: int) -> None:
    """Write one checkpoint and remove all but the ``keep`` newest; collective over all ranks.

    Args:
        state: flat; DTensors are written as shards, plain tensors with the same key once.

    Raises:
        RuntimeError: on every rank, if rank 0 does not find what the others wrote.
    """
    final = directory / f"step-{position.step:08d}"
    partial = final.with_suffix(".tmp")
    rank = dist.get_rank()
    if rank == 0:
        _remove(partial)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=str(partial))  # syncs each file to disk

    mine = {path.name: _digest(path) for path in sorted(partial.glob(f"__{rank}_*"))}
    digests: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(digests, mine)
    unseen = [[name for part in digests for name in part if not (partial / name).exists()]]
    dist.broadcast_object_list(unseen, src=0)  # what rank 0 sees counts
    if unseen[0]:
        raise RuntimeError(
            f"checkpoints must lie where all ranks see them, but rank 0 does not find "
            f"{', '.join(unseen[0])} of other ranks in {partial}"
        )
    if rank == 0:
        files = {name: digest for part in digests for name, digest in part.items()}
        files[".metadata"] = _digest(partial / ".metadata")
        _write_synced(
            partial / MANIFEST, json.dumps({**asdict(position), "files": files}, indent=1)
        )
        _sync_directory(partial)
        _remove(final)
        partial.rename(final)
        _sync_directory(directory)
        for old in _named(directory)[:-keep]:
            _remove(old)
    dist.barrier()


def newest_whole(directory: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint whose manifest and files agree; ``say`` which were skipped.

    For one rank; it changes nothing on disk.
    """
    for path in reversed(_named(directory)):
        try:
            return Checkpoint(path, _verify(path))
        except _NotWhole as error:
            say(f"checkpoint {path} is not whole ({error}); skipping it")
    return None


def clean(directory: Path, resumed: Checkpoint | None, say: Callable[[str], None]) -> None:
    """Remove what was never finished and set aside what is newer than ``resumed``, as ``.bad``.

    For one rank, at the start of a run: a damaged checkpoint must not count among those to keep.
    """
    for partial in sorted(directory.glob("step-*.tmp")):
        say(f"checkpoint {partial} was never finished; removing it")
        shutil.rmtree(partial)
    for old in directory.glob("step-*.old"):
        shutil.rmtree(old)
    for path in _named(directory):
        if resumed is None or path > resumed.path:
            bad = path.with_suffix(".bad")
            if bad.exists():
                shutil.rmtree(bad)
            path.rename(bad)


def load(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Fill the tensors of ``state`` in place from the checkpoint; collective over all ranks."""
    dcp.load(state, checkpoint_id=str(checkpoint.path))


class _NotWhole(Exception):
    """Why a directory is not a whole checkpoint."""


def _verify(path: Path) -> Position:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest.pop("files")
        position = Position(**manifest)
    except FileNotFoundError:
        raise _NotWhole(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _NotWhole(f"{MANIFEST} cannot be read: {error}") from error
    for name, digest in files.items():
        if not (path / name).is_file():
            raise _NotWhole(f"{name} is missing")
        if _digest(path / name) != digest:
            raise _NotWhole(f"{name} has other contents than its manifest says")
    return position


def _named(directory: Path) -> list[Path]:
    """Return ``step-*`` directories, oldest first; neither ``.tmp`` nor ``.bad``."""
    return sorted(path for path in directory.glob("step-*") if not path.suffix)


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        sha256 = hashlib.sha256()
        while block := file.read(1 << 20):
            sha256.update(block)
        return {"bytes": file.tell(), "sha256": sha256.hexdigest()}


def _remove(path: Path) -> None:
    """Remove a directory, if it is there, so that a reader sees all of it or nothing."""
    if path.exists():
        old = path.with_suffix(".old")
        path.rename(old)
        shutil.rmtree(old)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
