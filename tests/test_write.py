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

from flce_dist.launch.program import RunError
from flce_dist.launch.write import check_writable, replacing, write_json, writing


def test_a_file_is_there_once_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    with replacing(path) as scratch:
        scratch.write_text("first")
        assert scratch.parent == path.parent and not path.exists()
    with replacing(path) as scratch:
        scratch.write_text("second")
        assert path.read_text() == "first"
    assert path.read_text() == "second"
    assert list(path.parent.iterdir()) == [path]


def test_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("first")
    with pytest.raises(KeyError), replacing(path) as scratch:
        scratch.write_text("sec")
        raise KeyError
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_strict_and_ends_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"a": [1, math.nan], "b": (math.inf, 0.5)})
    text = path.read_text()
    assert json.loads(text) == {"a": [1, None], "b": [None, 0.5]}
    assert text.endswith("}\n")


def test_a_full_disk_leaves_the_last_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"records": [1]})
    before = path.read_text()

    def half(self: Path, text: str, **kwargs: Any) -> None:
        self.write_bytes(text[:5].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(RunError, match=r"cannot write .*out\.json: No space left on device$"):
        write_json(path, {"records": [1, 2]})
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def test_an_error_without_a_number_says_what_it_says(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"a: 8 requested and 3 written; it needs 8 bytes, \d+ are"):
        with writing(tmp_path / "a", 8):
            raise OSError("8 requested and 3 written")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_is_read_only_is_named_without_sizes(tmp_path: Path, code: int) -> None:
    with pytest.raises(RunError) as error, writing(tmp_path / "run" / "a", 134):
        raise OSError(code, os.strerror(code))
    said = f"cannot write {tmp_path}/run/a: {tmp_path} cannot be written: {os.strerror(code)}"
    assert str(error.value) == said


def test_what_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    check_writable(path)
    assert list(path.parent.iterdir()) == []
    path.write_text("first")
    check_writable(path)
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"cannot write {tmp_path}: Is a directory$"):
        check_writable(tmp_path)


LAUNCH = Path(__file__).parent.parent / "launch"


def test_results_are_written_in_no_other_way() -> None:
    """But for files of a checkpoint, which has a folder of its own, and torchrun's error file."""
    in_place = re.compile(r"\.savefig\(|(?<!scratch)\.(write_(text|bytes)\(|open\(.w)|FileIO\(")
    found = [path for path in LAUNCH.rglob("*.py") if in_place.search(path.read_text())]
    names = {path.relative_to(LAUNCH).as_posix() for path in found}
    assert names == {"write.py", "train/files.py", "program.py"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bench", ["--config", f"{LAUNCH.parent}/configs/bench/smoke.yaml", "--out", "{stem}"]),
        ("verify", ["--output", "{stem}.json"]),
    ],
)
def test_work_that_would_be_lost_does_not_begin(
    name: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("tyro", "rich", "megatron.core"):
        pytest.importorskip(package)
    program = importlib.import_module(f"flce_dist.launch.{name}.__main__")
    monkeypatch.setattr(program, "start", lambda *args: pytest.fail("begun"))
    (tmp_path / "file").write_text("in the way")
    stem = tmp_path / "file" / "new" / "out"
    with pytest.raises(RunError, match=rf"cannot write {stem}\.json: .*/file is not a directory$"):
        program.main([text.format(stem=stem) for text in arguments])
