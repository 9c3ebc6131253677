"""Checkpoints are whole or skipped, whatever a kill or a disk did to them."""

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flce_dist.launch.process_group import together
from flce_dist.launch.program import RunError
from flce_dist.launch.train import checkpoint
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


def rank_load(group: Any, directory: Path) -> str:
    """Rank 1 is on a machine that does not see the folder."""
    seen = directory if group.rank() == 0 else directory / "elsewhere"
    with pytest.raises(RunError) as error:
        together(lambda: Checkpoint(seen, 15, 30, CONFIG).load(group.rank()))
    return str(error.value)


def test_a_checkpoint_that_one_rank_does_not_see_is_one_error_on_all(ranks, saved):
    said = ranks.run(rank_load, saved)
    path = saved / "elsewhere" / "step-00000015" / "rank-00001.pt"
    seen = f"{path} must lie where all ranks see it, but one cannot read it: No such file"
    assert said == [f"{seen} or directory"] * 2


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def newest(directory: Path) -> tuple[int | None, list[str]]:
    messages: list[str] = []
    found = newest_whole(directory, messages.append)
    return None if found is None else found.step, messages


def test_the_newest_are_kept_and_load_what_was_saved(directory):
    assert names(directory) == ["step-00000010", "step-00000015"]
    assert newest(directory) == (15, []) and newest(directory / "nowhere") == (None, [])
    found = newest_whole(directory, print)
    assert found == Checkpoint(directory, 15, 30, CONFIG)
    for rank in range(2):
        state = found.load(rank)
        assert torch.equal(state["weight"], torch.full((300, 4), 15 + rank)) and state["step"] == 15


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def write_list(path: Path) -> None:
    path.write_text("[]")


def be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def nest(path: Path) -> None:
    path.write_text("[" * 100_000)


def list_one_rank(manifest: Path) -> None:
    values = json.loads(manifest.read_bytes())
    del values["sha256"], values["files"]["rank-00001.pt"]
    manifest.write_bytes(checkpoint._render(values))


def be_of_step_10(manifest: Path) -> None:
    shutil.copy(manifest.parents[1] / "step-00000010" / MANIFEST, manifest)


@pytest.mark.parametrize("file, damage, reason", [
    ("rank-00001.pt", truncate, "rank-00001.pt has other contents"),
    (MANIFEST, be_a_folder, "manifest.json cannot be read: Is a directory"),
    (MANIFEST, be_a_fifo, "manifest.json cannot be read: Not a regular file"),
    ("rank-00001.pt", be_a_fifo, "rank-00001.pt cannot be read: Not a regular file"),
    (MANIFEST, nest, "manifest.json cannot be read: JSON of too many levels"),
    (MANIFEST, write_list, "manifest.json must hold a JSON object, got []"),
    (MANIFEST, be_of_step_10, "manifest.json is that of step 10"),
    (MANIFEST, list_one_rank, "manifest.json does not list the file of every rank"),
])  # fmt: skip
def test_a_damaged_newest_is_skipped_by_name(directory, file, damage, reason):
    damage(directory / "step-00000015" / file)
    step, (damaged, decision) = newest(directory)
    assert step == 10 and decision == "going back to checkpoint step 10"
    assert damaged.startswith(f"checkpoint step 15 is damaged: {reason}")


def test_one_of_another_version_is_refused_and_not_taken_for_damaged(directory):
    """Else a start would go back to an older one, and set it aside."""
    path = directory / "step-00000015" / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_bytes(checkpoint._render({**manifest, "format": 2}))
    with pytest.raises(RunError, match=r"step-00000015 is of another version .* format, exp"):
        newest(directory)
    path.write_bytes(checkpoint._render({**manifest, "files": {}}))
    assert newest(directory)[0] == 10


def test_no_flipped_bit_goes_unseen(directory):
    """Every bit of the manifest, and a sample of each other file's; none is left to go back to."""
    (directory / "step-00000010" / MANIFEST).unlink()
    expected = r"step 15 is damaged: {} .*step 10 is damaged: .*move them elsewhere"
    for path in sorted((directory / "step-00000015").iterdir()):
        content = path.read_bytes()
        bits: Any = range(8 * len(content))
        if path.name != MANIFEST:
            bits = random.Random(0).sample(bits, 300)
        with path.open("r+b", buffering=0) as file:
            for byte, bit in (divmod(place, 8) for place in bits):
                os.pwrite(file.fileno(), bytes([content[byte] ^ 1 << bit]), byte)
                with pytest.raises(RunError, match=expected.format(path.name)):
                    newest(directory)
                os.pwrite(file.fileno(), content[byte : byte + 1], byte)
    assert newest(directory) == (15, [])


def test_loading_runs_no_code(directory):
    torch.save({"weight": shutil.copytree}, directory / "step-00000015" / "rank-00000.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
        Checkpoint(directory, 15, 30, CONFIG).load(0)


def test_half_written_ones_are_removed_and_strangers_are_left_alone(directory):
    strangers = ["step-000000020", "step-00000010 (copy)", "step-note", "step.tmp"]
    for name in [*strangers, "step-00000020.tmp", "step-00000005.old"]:
        shutil.copytree(directory / "step-00000015", directory / name)
    messages: list[str] = []
    clean(directory, newest_whole(directory, messages.append), messages.append)
    assert names(directory) == sorted([*strangers, "step-00000010", "step-00000015"])
    (message,) = messages
    assert "step-00000020.tmp was never finished; removing it" in message


def test_damaged_ones_are_set_aside_and_do_not_count_among_the_kept(ranks, directory):
    for _ in range(2):  # a second time over what the first set aside
        truncate(directory / "step-00000015" / "rank-00000.pt")
        clean(directory, newest_whole(directory, lambda _: None), lambda _: None)
        assert names(directory) == ["step-00000010", "step-00000015.bad"]
        ranks.run(rank_save, directory, [15], 2)
        assert names(directory) == ["step-00000010", "step-00000015", "step-00000015.bad"]


def rank_error(group: Any, directory: Path, fault: str = "") -> str:
    """Save step 20 where ``fault`` is a file that meets a full disk, or another of the below."""
    write_synced, gather = checkpoint.write_synced, checkpoint.together
    gathered: list[Any] = []

    def on_a_full_disk(path: Path, content: Any) -> dict[str, Any]:
        return write_synced(Path("/dev/full") if path.name == fault else path, content)

    def together(work: Callable[[], Any]) -> list[Any]:
        gathered.append(gather(work))
        if fault == "killed" and len(gathered) == 2:  # all have written, rank 0 not the manifest
            raise KeyboardInterrupt
        return gathered[-1]

    if fault == "apart" and group.rank() == 1:  # as on nodes with no common file system
        directory = directory.with_name("elsewhere")
    if fault == "no folder":
        directory = directory / "step-00000015" / MANIFEST
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_synced", on_a_full_disk)
        patch.setattr(checkpoint, "together", together)
        try:
            rank_save(group, directory, [20], 2)
        except (RunError, KeyboardInterrupt) as error:
            return str(error)
    return "saved"


def test_a_save_that_is_cut_short_leaves_the_last_one_and_can_be_repeated(ranks, directory):
    ranks.run(rank_error, directory, "killed")
    assert names(directory) == ["step-00000010", "step-00000015", "step-00000020.tmp"]
    assert newest(directory) == (15, [])
    assert ranks.run(rank_error, directory) == ["saved"] * 2
    assert names(directory) == ["step-00000015", "step-00000020"]


FULL = r"{}/step-00000020.tmp: No space left on device; it needs 19216 bytes, \d+ are free"
"""1200 + 1 int64 of each rank."""
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@pytest.mark.parametrize("fault, expected", [
    pytest.param(MANIFEST, f"cannot write {FULL}", marks=needs_full),
    ("no folder", "cannot write .*/step-00000020.tmp: {}/.*/manifest.json is not a directory"),
    ("apart", "checkpoints must lie where all ranks see them, .* find rank-00001.pt of .*"),
])  # fmt: skip
def test_a_failed_save_is_one_error_on_all_ranks_and_leaves_the_old_checkpoints(
    ranks, directory, fault, expected
):
    for message in ranks.run(rank_error, directory, fault):
        assert re.fullmatch(expected.format(directory), message), message
    assert names(directory) == ["step-00000010", "step-00000015"]
    assert newest(directory) == (15, [])
    assert ranks.run(rank_error, directory) == ["saved"] * 2
