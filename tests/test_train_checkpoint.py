"""Checkpoints are whole or skipped, whatever a kill or a disk did to them."""

import errno
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flce_dist.launch.program import RunError
from flce_dist.launch.train import checkpoint
from flce_dist.launch.train import ranks as train_ranks
from flce_dist.launch.train.checkpoint import MANIFEST, Checkpoint, clean, newest_whole, save
from flce_dist.testing import RankPool

CONFIG = {"seed": 1, "world_size": 2}


def rank_save(group: Any, directory: Path, steps: list[int], keep: int) -> None:
    for step in steps:
        state = {"weight": torch.full((300, 4), step + group.rank()), "step": torch.tensor(step)}
        save(Checkpoint(directory, step, 2 * step, CONFIG), state, keep=keep)


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


def test_the_newest_are_kept_and_load_what_was_saved(directory: Path) -> None:
    assert names(directory) == ["step-00000010", "step-00000015"]
    messages: list[str] = []
    newest = newest_whole(directory, messages.append)
    assert newest == Checkpoint(directory, 15, 30, CONFIG)
    assert messages == []
    manifest = json.loads((newest.path / MANIFEST).read_text())
    assert (manifest["step"], manifest["samples"], manifest["config"]) == (15, 30, CONFIG)
    assert list(manifest["files"]) == ["rank-00000.pt", "rank-00001.pt"]
    for rank in range(2):
        state = newest.load(rank)
        assert (state["weight"] == 15 + rank).all() and state["weight"].shape == (300, 4)
        assert state["step"] == 15


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def write(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "file, damage, reason",
    [
        ("rank-00001.pt", truncate, "rank-00001.pt has other contents"),
        ("rank-00001.pt", Path.unlink, "rank-00001.pt cannot be read: No such file"),
        ("rank-00001.pt", be_a_folder, "rank-00001.pt cannot be read: Is a directory"),
        (MANIFEST, Path.unlink, "manifest.json cannot be read: No such file"),
        (MANIFEST, be_a_folder, "manifest.json cannot be read: Is a directory"),
        (MANIFEST, write("[]"), "manifest.json must hold a JSON object, got []"),
        (MANIFEST, write('"text"'), "manifest.json must hold a JSON object, got 'text'"),
        (MANIFEST, write("{}"), "manifest.json has other contents than its own digest says"),
    ],
)
def test_a_damaged_newest_is_skipped_by_name(
    directory: Path, file: str, damage: Callable[[Path], object], reason: str
) -> None:
    damage(directory / "step-00000015" / file)
    messages: list[str] = []
    newest = newest_whole(directory, messages.append)
    assert newest is not None and newest.step == 10
    damaged, decision = messages
    assert damaged.startswith(f"checkpoint step 15 is damaged: {reason}")
    assert decision == "going back to checkpoint step 10"


def test_no_flipped_bit_goes_unseen(directory: Path) -> None:
    """Every bit of the manifest, and a sample of each other file's."""
    shutil.rmtree(directory / "step-00000010")
    for path in sorted((directory / "step-00000015").iterdir()):
        content = path.read_bytes()
        bits: Any = range(8 * len(content))
        if path.name != MANIFEST:
            bits = random.Random(0).sample(bits, 300)
        with path.open("r+b", buffering=0) as file:
            for byte, bit in (divmod(place, 8) for place in bits):
                os.pwrite(file.fileno(), bytes([content[byte] ^ 1 << bit]), byte)
                with pytest.raises(RunError, match=f"checkpoint step 15 is damaged: {path.name} "):
                    newest_whole(directory, lambda _: None)
                os.pwrite(file.fileno(), content[byte : byte + 1], byte)
    assert newest_whole(directory, lambda _: None) is not None


def rewrite(manifest: Path, **changes: Any) -> None:
    """Change a manifest and make its digest fit."""
    values = json.loads(manifest.read_bytes())
    del values["sha256"]
    manifest.write_bytes(checkpoint._render(values | changes))


def test_a_manifest_must_name_its_folder_and_the_file_of_every_rank(directory: Path) -> None:
    manifest = directory / "step-00000015" / MANIFEST
    files = json.loads(manifest.read_bytes())["files"]
    (directory / "step-00000010").rename(directory / "step-00000016")
    messages: list[str] = []
    newest = newest_whole(directory, messages.append)
    assert newest is not None and newest.step == 15
    assert messages[0] == "checkpoint step 16 is damaged: manifest.json is that of step 10"
    rewrite(manifest, files={"rank-00000.pt": files["rank-00000.pt"]})
    with pytest.raises(RunError, match=r"damaged: manifest\.json does not list the file of"):
        newest_whole(directory, messages.append)


def test_all_damaged_is_refused(directory: Path) -> None:
    for path in directory.iterdir():
        flip_a_bit(path / "rank-00001.pt")
    messages: list[str] = []
    with pytest.raises(RunError, match=r"step 15 is damaged: .*step 10 is.*move them elsewhere"):
        newest_whole(directory, messages.append)
    assert messages == [] and names(directory) == ["step-00000010", "step-00000015"]
    for path in directory.iterdir():
        path.rename(path.with_suffix(".bad"))
    assert newest_whole(directory, messages.append) is None  # set aside is out of the way
    assert newest_whole(directory / "nowhere", messages.append) is None


class Malice:
    def __reduce__(self) -> Any:
        return (exec, ("raise AssertionError('code was run')",))


def test_loading_runs_no_code(directory: Path) -> None:
    newest = newest_whole(directory, lambda _: None)
    assert newest is not None
    torch.save({"weight": Malice()}, newest.path / "rank-00000.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
        newest.load(0)


def test_half_written_ones_are_removed_and_strangers_are_left_alone(directory: Path) -> None:
    strangers = ["step-000000020", "step-00000010 (copy)", "step-note", "step.tmp"]
    for name in [*strangers, "step-00000020.tmp", "step-00000005.old"]:
        shutil.copytree(directory / "step-00000015", directory / name)
    messages: list[str] = []
    newest = newest_whole(directory, messages.append)
    assert newest is not None and newest.step == 15
    clean(directory, newest, messages.append)
    assert names(directory) == sorted([*strangers, "step-00000010", "step-00000015"])
    (message,) = messages
    assert "step-00000020.tmp was never finished; removing it" in message


def test_damaged_ones_are_set_aside_and_do_not_count_among_the_kept(
    ranks: RankPool, directory: Path
) -> None:
    for _ in range(2):  # a second time over what the first set aside
        flip_a_bit(directory / "step-00000015" / "rank-00000.pt")
        clean(directory, newest_whole(directory, lambda _: None), lambda _: None)
        assert names(directory) == ["step-00000010", "step-00000015.bad"]
        ranks.run(rank_save, directory, [15], 2)
        assert names(directory) == ["step-00000010", "step-00000015", "step-00000015.bad"]


def rank_save_until_killed(group: Any, directory: Path) -> None:
    """Stop where each rank has written its file and rank 0 not yet the manifest."""
    gathers = iter([None, KeyboardInterrupt])  # of sizes, of digests

    def together(work: Callable[[], Any]) -> list[Any]:
        results = train_ranks.together(work)
        if (error := next(gathers)) is not None:
            raise error
        return results

    stop = mock.patch.object(checkpoint, "together", together)
    with stop, pytest.raises(KeyboardInterrupt):
        rank_save(group, directory, [20], 2)


def test_a_save_that_is_cut_short_leaves_the_last_one_and_can_be_repeated(
    ranks: RankPool, directory: Path
) -> None:
    ranks.run(rank_save_until_killed, directory)
    assert names(directory) == ["step-00000010", "step-00000015", "step-00000020.tmp"]
    newest = newest_whole(directory, lambda _: None)
    assert newest is not None and newest.step == 15
    ranks.run(rank_save, directory, [20], 2)
    assert names(directory) == ["step-00000015", "step-00000020"]


def rank_error(group: Any, directory: Path, apart: bool = False) -> str:
    """``apart``: each rank in a directory of its own, as on nodes with no common file system."""
    directory = directory / str(group.rank()) if apart else directory
    try:
        rank_save(group, directory, [20], 2)
    except RunError as error:
        return str(error)
    return "saved"


def rank_save_with_a_full_disk(group: Any, directory: Path, where: str) -> str:
    """Save where one rank's write fails, by the kernel's own doing."""
    write = checkpoint.write_synced

    def full_disk(path: Path, content: Any) -> dict[str, Any]:
        return write(Path("/dev/full") if path.name == where else path, content)

    with mock.patch.object(checkpoint, "write_synced", full_disk):
        return rank_error(group, directory)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("where", ["rank-00001.pt", MANIFEST])
def test_a_full_disk_is_one_error_on_all_ranks_and_leaves_the_old_checkpoints(
    ranks: RankPool, directory: Path, where: str
) -> None:
    before = names(directory)
    messages = ranks.run(rank_save_with_a_full_disk, directory, where)
    expected = f"cannot write {directory}/step-00000020.tmp: {os.strerror(errno.ENOSPC)}; "
    expected += r"it needs 19216 bytes, \d+ are free"  # 1200 + 1 int64 of each rank
    for message in messages:
        assert re.fullmatch(expected, message), message
    assert names(directory) == before
    newest = newest_whole(directory, lambda _: None)
    assert newest is not None and newest.step == 15
    assert ranks.run(rank_error, directory) == ["saved"] * 2


def test_a_folder_that_cannot_be_written_is_one_error(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for message in ranks.run(rank_error, tmp_path / "file" / "checkpoints"):
        assert "checkpoints/step-00000020.tmp: " in message
        assert message.endswith(f"{tmp_path}/file is not a directory")


def test_directories_that_ranks_do_not_share_are_refused_on_every_rank(
    ranks: RankPool, directory: Path
) -> None:
    for message in ranks.run(rank_error, directory / "apart", True):
        assert message.startswith("checkpoints must lie where all ranks see them")
        assert "rank-00001.pt" in message
    assert names(directory / "apart" / "0") == []
