"""Checkpoints that are whole or not there: written aside, verified by checksums, then renamed.

A checkpoint is a directory ``step-00000050`` with one file of tensors per rank and
``manifest.json``: the step, the position in the data, the configuration, size and SHA-256 of each
file, and the SHA-256 of the manifest itself. A process killed at any moment leaves at most
directories ``.tmp`` (being written) and ``.old`` (being removed), which the next start removes. All
ranks must share the directory. Loading runs nothing that a file holds (``weights_only``).
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flce_dist.launch.process_group import on_rank_0, together
from flce_dist.launch.program import RunError
from flce_dist.launch.read import digest, parse_json, read_bytes
from flce_dist.launch.write import write_synced, writing

MANIFEST = "manifest.json"
VALUES = "step", "samples", "config"
"""Of a checkpoint, in its manifest."""
KEYS = {*VALUES, "files"}
"""Of a manifest, beside its digest."""
NAME = r"step-(\d{8}|[1-9]\d{8,})"


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands: ``step`` updates are done and ``samples`` sequences were read."""

    directory: Path
    """Of this checkpoint and others."""
    step: int
    samples: int
    config: dict[str, Any]
    """The run's configuration, flat, and ``world_size``: how many ranks write a checkpoint."""

    @property
    def path(self) -> Path:
        return self.directory / f"step-{self.step:08d}"

    def load(self, rank: int) -> dict[str, Tensor]:
        """Return what ``rank`` wrote, on the CPU; ``RunError`` if it is not seen here."""
        path = self.path / shard_name(rank)
        try:
            state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            must = f"{path} must lie where all ranks see it"
            raise RunError(f"{must}, but one cannot read it: {error.strerror}") from error
        return state


def save(checkpoint: Checkpoint, state: dict[str, Tensor], *, keep: int) -> None:
    """Write a checkpoint and remove all but the ``keep`` newest; collective over all ranks.

    ``state`` is what this rank writes into the file of its own. Raises ``RunError`` on every rank
    if one cannot write, or rank 0 does not find what others wrote; older checkpoints stay.
    """
    partial = checkpoint.path.with_suffix(".tmp")
    needed = sum(together(lambda: sum(tensor.nbytes for tensor in state.values())))

    @writing(partial, needed)
    def prepare() -> None:
        _remove(partial)
        partial.mkdir(parents=True)

    @writing(partial, needed)
    def write() -> dict[str, Any]:
        partial.mkdir(parents=True, exist_ok=True)  # rank 0's, if the ranks share it
        return write_synced(partial / shard_name(dist.get_rank()), state)

    @writing(partial, needed)
    def finish() -> None:
        files = {shard_name(rank): digest_of_rank for rank, digest_of_rank in enumerate(digests)}
        unseen = [name for name in files if not (partial / name).exists()]
        if unseen:
            raise RunError(
                f"checkpoints must lie where all ranks see them, but rank 0 does not find "
                f"{', '.join(unseen)} of other ranks in {partial}"
            )
        values = {key: getattr(checkpoint, key) for key in VALUES}
        write_synced(partial / MANIFEST, _render({**values, "files": files}))
        _sync_directory(partial)
        partial.rename(checkpoint.path)
        _sync_directory(checkpoint.directory)
        for old in named(checkpoint.directory)[:-keep]:
            _remove(old)

    try:
        on_rank_0(prepare)
        digests = together(write)
        on_rank_0(finish)
    except RunError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def newest_whole(directory: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint whose manifest and files agree; ``say`` which were skipped.

    For one rank; it changes nothing on disk. Raises ``RunError`` if all that are there are damaged,
    or one is whole and of another version, which no damage is.
    """
    damaged = []
    for path in reversed(named(directory)):
        try:
            checkpoint = _verify(path)
        except _Damaged as error:
            damaged.append(f"checkpoint step {_step(path)} is damaged: {error}")
            continue
        if damaged:
            for message in [*damaged, f"going back to checkpoint step {_step(path)}"]:
                say(message)
        return checkpoint
    if damaged:
        raise RunError(
            f"no checkpoint in {directory} is whole ({'; '.join(damaged)}); "
            "to start at step 0, move them elsewhere"
        )
    return None


def clean(directory: Path, resumed: Checkpoint | None, say: Callable[[str], None]) -> None:
    """Remove what was never finished and set aside what is newer than ``resumed``, as ``.bad``.

    For one rank, at the start of a run: a damaged checkpoint must not count among those to keep.
    """
    for path in directory.iterdir():
        if path.is_dir() and re.fullmatch(NAME + r"\.(tmp|old)", path.name):
            if path.suffix == ".tmp":
                say(f"checkpoint {path} was never finished; removing it")
            shutil.rmtree(path)
    for path in named(directory):
        if resumed is not None and _step(path) > resumed.step:
            bad = path.with_suffix(".bad")
            shutil.rmtree(bad, ignore_errors=True)
            path.rename(bad)


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


class _Damaged(Exception):
    """Which file of a checkpoint is damaged, and how."""


def _verify(path: Path) -> Checkpoint:
    name = MANIFEST
    try:
        content = read_bytes(path / MANIFEST)
        manifest = parse_json(content)
        if not isinstance(manifest, dict):
            raise _Damaged(f"{MANIFEST} must hold a JSON object, got {manifest!r:.40}")
        manifest.pop("sha256", None)
        if _render(manifest) != content:
            raise _Damaged(f"{MANIFEST} has other contents than its own digest says")
        if set(manifest) != KEYS:
            raise RunError(
                f"{path} is of another version of flce_dist: its {MANIFEST} has "
                f"{', '.join(manifest)}, expected {', '.join(sorted(KEYS))}; continue with that "
                "version, or use another --out-dir"
            )
        files = manifest.pop("files")
        checkpoint = Checkpoint(path.parent, **manifest)
        if checkpoint.step != _step(path):
            raise _Damaged(f"{MANIFEST} is that of step {checkpoint.step}")
        if list(files) != [shard_name(rank) for rank in range(checkpoint.config["world_size"])]:
            raise _Damaged(f"{MANIFEST} does not list the file of every rank")
        for name, expected in files.items():
            if digest(path / name) != expected:
                raise _Damaged(f"{name} has other contents than {MANIFEST} says")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _Damaged(f"{name} cannot be read: {reason}") from error
    return checkpoint


def named(directory: Path) -> list[Path]:
    """Return the directories that are named as checkpoints are, oldest first."""
    named = [path for path in directory.glob("step-*") if re.fullmatch(NAME, path.name)]
    return sorted((path for path in named if path.is_dir()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _render(manifest: dict[str, Any]) -> bytes:
    """Return the one text of a manifest: any other bytes with the same values are damaged."""
    sha256 = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": sha256}, indent=1).encode()


def _remove(path: Path) -> None:
    """Remove a directory, if it is there, so that a reader sees all of it or nothing."""
    if path.exists():
        old = path.with_suffix(".old")
        path.rename(old)
        shutil.rmtree(old)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
