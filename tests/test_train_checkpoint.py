"""Checkpoints are whole or skipped, whatever a kill or a disk did to them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flce_dist.launch.train_checkpoint import (
    MANIFEST,
    Checkpoint,
    Position,
    clean,
    load,
    newest_whole,
    save,
)
from flce_dist.testing import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def state_of(group: Any, fill: float) -> dict[str, Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu")
    shard = torch.full((3, 4), fill + group.rank())
    return {
        "weight": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False),
        "norm": torch.full((4,), fill),
        f"random.rank{group.rank()}": torch.full((2,), fill + 10 * group.rank()),
    }


def rank_save(group: Any, directory: Path, steps: list[int], keep: int) -> None:
    for step in steps:
        position = Position(step, 2 * step, {"seed": 1})
        save(directory, position, state_of(group, float(step)), keep=keep)


def rank_load(group: Any, checkpoint: Checkpoint) -> dict[str, Tensor]:
    state = state_of(group, -1.0)
    load(checkpoint, state)
    return {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


@pytest.fixture(scope="module")
def ranks() -> Any:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    ranks.run(rank_save, directory, [5, 10, 15], 2)
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A fresh copy of two checkpoints, of steps 10 and 15."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_are_kept_and_load_what_was_saved(ranks: RankPool, directory: Path) -> None:
    assert names(directory) == ["step-00000010", "step-00000015"]
    messages: list[str] = []
    newest = newest_whole(directory, messages.append)
    assert newest == Checkpoint(directory / "step-00000015", Position(15, 30, {"seed": 1}))
    assert messages == []
    for rank, state in enumerate(ranks.run(rank_load, newest)):
        assert (state["weight"] == 15 + rank).all()
        assert (state["norm"] == 15).all()
        assert (state[f"random.rank{rank}"] == 15 + 10 * rank).all()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def write(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "file, damage, reason",
    [
        ("__1_0.distcp", truncate, "__1_0.distcp has other contents"),
        ("__0_0.distcp", flip_a_bit, "__0_0.distcp has other contents"),
        ("__1_0.distcp", Path.unlink, "__1_0.distcp is missing"),
        (".metadata", Path.unlink, ".metadata is missing"),
        (MANIFEST, Path.unlink, "manifest.json is missing"),
        (MANIFEST, truncate, "manifest.json cannot be read"),
        (MANIFEST, write("[]"), "manifest.json cannot be read"),
        (MANIFEST, write("{}"), "manifest.json cannot be read"),
        (MANIFEST, write('{"files": {}, "step": 15}'), "manifest.json cannot be read"),
    ],
)
def test_a_damaged_newest_is_skipped_by_name(
    directory: Path, file: str, damage: Callable[[Path], object], reason: str
) -> None:
    damage(directory / "step-00000015" / file)
    messages: list[str] = []
    newest = newest_whole(directory, messages.append)
    assert newest is not None and newest.position.step == 10
    (message,) = messages
    assert "step-00000015 is not whole" in message and reason in message


def test_all_damaged_is_a_fresh_start(directory: Path) -> None:
    for path in directory.iterdir():
        (path / MANIFEST).unlink()
    messages: list[str] = []
    assert newest_whole(directory, messages.append) is None
    assert len(messages) == 2
    assert newest_whole(directory / "nowhere", messages.append) is None


def test_half_written_ones_are_not_candidates_and_are_removed(directory: Path) -> None:
    shutil.copytree(directory / "step-00000015", directory / "step-00000020.tmp")
    shutil.copytree(directory / "step-00000010", directory / "step-00000005.old")
    messages: list[str] = []
    newest = newest_whole(directory, messages.append)
    assert newest is not None and newest.position.step == 15
    clean(directory, newest, messages.append)
    assert names(directory) == ["step-00000010", "step-00000015"]
    (message,) = messages
    assert "step-00000020.tmp was never finished; removing it" in message


def test_damaged_ones_are_set_aside_and_do_not_count_among_the_kept(
    ranks: RankPool, directory: Path
) -> None:
    for _ in range(2):  # a second time over what the first set aside
        flip_a_bit(directory / "step-00000015" / "__0_0.distcp")
        clean(directory, newest_whole(directory, lambda _: None), lambda _: None)
        assert names(directory) == ["step-00000010", "step-00000015.bad"]
        ranks.run(rank_save, directory, [15], 2)
        assert names(directory) == ["step-00000010", "step-00000015", "step-00000015.bad"]


def rank_save_until_killed(group: Any, directory: Path) -> None:
    """Stop where each rank has written its shard and rank 0 not yet the manifest."""
    stop = mock.patch.object(dist, "all_gather_object", side_effect=KeyboardInterrupt)
    with stop, pytest.raises(KeyboardInterrupt):
        rank_save(group, directory, [20], 2)


def test_a_save_that_is_cut_short_leaves_the_last_one_and_can_be_repeated(
    ranks: RankPool, directory: Path
) -> None:
    ranks.run(rank_save_until_killed, directory)
    assert names(directory) == ["step-00000010", "step-00000015", "step-00000020.tmp"]
    newest = newest_whole(directory, lambda _: None)
    assert newest is not None and newest.position.step == 15
    ranks.run(rank_save, directory, [20], 2)
    assert names(directory) == ["step-00000015", "step-00000020"]


def rank_save_apart(group: Any, directory: Path) -> str:
    """Every rank into a directory of its own, as on nodes without a common file system."""
    try:
        rank_save(group, directory / str(group.rank()), [1], 2)
    except RuntimeError as error:
        return str(error)
    return "saved"


def test_directories_that_ranks_do_not_share_are_refused_on_every_rank(
    ranks: RankPool, directory: Path
) -> None:
    messages = ranks.run(rank_save_apart, directory / "apart")
    assert len(messages) == 2
    for message in messages:
        assert message.startswith("checkpoints must lie where all ranks see them")
        assert "__1_0.distcp" in message
    assert newest_whole(directory / "apart" / "0", print) is None


def test_the_manifest_says_what_is_in_it(directory: Path) -> None:
    manifest = json.loads((directory / "step-00000015" / MANIFEST).read_text())
    assert (manifest["step"], manifest["samples"], manifest["config"]) == (15, 30, {"seed": 1})
    assert sorted(manifest["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
