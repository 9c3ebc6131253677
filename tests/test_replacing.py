"""A file is replaced as a whole or stays as it was."""

from pathlib import Path

import pytest

from flce_dist.launch.replacing import replacing


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
