"""A file is replaced as a whole or stays as it was; what fails is one line that names it."""

import errno
import importlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flce_dist.launch import write as write_module
from flce_dist.launch.program import RunError
from flce_dist.launch.read import parse_json, read_bytes
from flce_dist.launch.write import (
    check_writable,
    replacing,
    with_suffix,
    write_json,
    write_synced,
    writing,
)


def test_a_file_is_replaced_at_the_end_or_stays(tmp_path):
    path = tmp_path / "new" / "out.json"
    check_writable(path)
    assert list(path.parent.iterdir()) == []
    for before, text in ((None, "first"), ("first", "second")):
        with replacing(path) as scratch:
            scratch.write_text(text)
            assert scratch.parent == path.parent
            assert (path.read_text() if path.exists() else None) == before
    full = OSError(errno.ENOSPC, "No space left on device")
    for error, raised in ((KeyError(), KeyError), (full, RunError)):
        with pytest.raises(raised), replacing(path) as scratch:
            scratch.write_text("thi")
            raise error
    check_writable(path)
    assert path.read_text() == "second" and list(path.parent.iterdir()) == [path]


def test_two_may_replace_a_file_at_one_time(tmp_path):
    path = tmp_path / "out.json"
    with replacing(path) as first:
        first.write_text("fir")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second" and first.read_text() == "fir"
    assert path.read_text() == "fir" and list(tmp_path.iterdir()) == [path]


def test_json_is_strict_and_ends_its_last_line(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, {"a": [1, math.nan], "b": (math.inf, 0.5)})
    text = path.read_text()
    assert json.loads(text) == {"a": [1, None], "b": [None, 0.5]}
    assert text.endswith("}\n")


@pytest.mark.parametrize(("error", "needed", "reason"), [
    (OSError(errno.ENOSPC, "No space left on device"), None, "No space left on device"),
    (OSError("8 requested and 3 written"), 8, r"8 .* written; it needs 8 bytes, \d+ are free"),
    (OSError(errno.ENOSPC, "Full"), 8, r"Full; it needs 8 bytes, \d+ are free"),
    (OSError(errno.EFBIG, "File too large"), 8, "File too large"),
    (OSError(errno.EROFS, "Read only"), 8, "{folder} cannot be written: Read only"),
])  # fmt: skip
def test_an_error_names_the_file_and_the_reason(tmp_path, error, needed, reason):
    path = tmp_path / "run" / "a"
    with pytest.raises(RunError) as raised, writing(path, needed):
        raise error
    assert re.fullmatch(f"cannot write {path}: {reason.format(folder=tmp_path)}", str(raised.value))


@pytest.mark.parametrize("stem", [".", "/", "runs/.."])
def test_a_stem_has_a_name(stem):
    assert with_suffix(Path("a/b.c"), ".json") == Path("a/b.c.json")
    with pytest.raises(RunError, match=f"--out must end in a name, .* got {re.escape(stem)}$"):
        with_suffix(Path(stem), ".json", "--out")


def test_a_file_where_a_folder_should_be_is_said_to_be_one(tmp_path):
    path = tmp_path / "checkpoints"
    path.write_text("")
    with pytest.raises(RunError, match=r"checkpoints: it is there and is not a directory$"):
        with writing(path):
            path.mkdir(exist_ok=True)


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_what_ends_a_write_of_tensors_is_raised_as_it_is(tmp_path, ended, monkeypatch):
    calls = []
    real = write_module._HashedFile.write

    def write(self: Any, data: Any) -> int:
        calls.append(len(data))
        if len(calls) == 3:  # torch then writes the end of the file
            raise ended
        return real(self, data)

    monkeypatch.setattr(write_module._HashedFile, "write", write)
    with pytest.raises(type(ended)) as raised:
        write_synced(tmp_path / "a.pt", {"x": torch.zeros(3)})
    assert raised.value is ended


LAUNCH = Path(__file__).parent.parent / "launch"


def test_results_are_written_in_no_other_way():
    """But for torchrun's error file."""
    in_place = re.compile(r"\.savefig\(|(?<!scratch)\.(write_(text|bytes)\(|open\(.w)|FileIO\(")
    found = [path for path in LAUNCH.rglob("*.py") if in_place.search(path.read_text())]
    names = {path.relative_to(LAUNCH).as_posix() for path in found}
    assert names == {"write.py", "program.py"}


def test_files_are_read_in_no_other_way():
    """But for one of a package and those of the kernel, which are what they are called."""
    plain = re.compile(r"\.read_(text|bytes)\(|json\.loads?\(|(?<!scratch)(?<!os)\.open\(")
    found = [path for path in LAUNCH.rglob("*.py") if plain.search(path.read_text())]
    names = {path.relative_to(LAUNCH).as_posix() for path in found}
    of_kernel = {"train/lock.py", "train/ranks.py", "verify/__main__.py"}
    assert names == {"read.py", "train/data.py", *of_kernel}


def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path(os.devnull)):
        with pytest.raises(OSError, match="Not a regular file"):
            read_bytes(path)
        for write in (check_writable, lambda path: write_json(path, {})):
            with pytest.raises(RunError, match=f"^cannot write {path}: Not a regular file$"):
                write(path)
        assert not path.is_file() and path.exists()
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(ValueError, match="JSON of too many levels"):
        parse_json("[" * 100_000)


@pytest.mark.parametrize(("name", "arguments"), [
    ("bench", ["--config", f"{LAUNCH.parent}/configs/bench/smoke.yaml", "--out", "{stem}"]),
    ("verify", ["--output", "{stem}.json"]),
])  # fmt: skip
def test_work_that_would_be_lost_does_not_begin(name, arguments, tmp_path, monkeypatch):
    for package in ("tyro", "rich", "megatron.core"):
        pytest.importorskip(package)
    program = importlib.import_module(f"flce_dist.launch.{name}.__main__")
    monkeypatch.setattr(program, "start", lambda *args: pytest.fail("begun"))
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.json").mkdir()
    for stem, reason in (
        (tmp_path / "file" / "new" / "out", ".*/file is not a directory"),
        (tmp_path / "folder", "Is a directory"),
    ):
        with pytest.raises(RunError, match=rf"cannot write {stem}\.json: {reason}$"):
            program.main([text.format(stem=stem) for text in arguments])
