"""How programs of launch/ end: what reaches the screen, torchrun's error file and the exit code."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from flce_dist.launch import program
from flce_dist.launch.program import RunError, run_program
from flce_dist.testing import RankPool


def raising(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


def ended(main: Callable[[], int], rank: int, file: Path, monkeypatch: Any) -> tuple[Any, str]:
    """Run as that rank; return the exit code and what its error file shows in torchrun's report."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit) as exit:
        run_program(main)
    if not file.exists():
        return exit.value.code, ""
    return exit.value.code, json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(program.time, "sleep", found.append)
    monkeypatch.setattr(program.signal, "signal", lambda *args: None)
    return found


@pytest.mark.parametrize("rank", [0, 3])
def test_an_error_that_explains_itself_is_one_line(rank, tmp_path, monkeypatch, capsys, waits):
    """Rank 0 speaks at once; another only if nobody ended it because of rank 0's exit."""
    main = raising(RunError("disk of\nruns/x is full"))
    line = f"error: {'rank 3: ' if rank else ''}disk of runs/x is full"
    assert ended(main, rank, tmp_path / "error.json", monkeypatch) == (2, line)
    assert capsys.readouterr() == ("", line + "\n")
    assert waits == ([program.WAIT_S] if rank else [])


def test_a_bug_shows_its_traceback(tmp_path, monkeypatch, capsys):
    found = ended(raising(KeyError("x")), 1, tmp_path / "error.json", monkeypatch)
    assert found == (1, "rank 1: KeyError: 'x'")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "KeyError: 'x'"


@pytest.mark.parametrize(
    "main, status",
    [
        (lambda: 0, 0),
        (lambda: 1, 1),
        (raising(KeyboardInterrupt()), 130),
        (raising(SystemExit(143)), 143),
        (raising(SystemExit(2)), 2),  # of a command line, explained before
    ],
)
def test_other_ends_say_nothing(main, status, tmp_path, monkeypatch, capsys, waits):
    assert ended(main, 1, tmp_path / "error.json", monkeypatch) == (status, "")
    assert capsys.readouterr() == ("", "")
    assert waits == ([program.WAIT_S] if status == 2 else [])


def rank_fails(group: dist.ProcessGroup) -> tuple[str, Any]:
    """A bug on each rank, the last one first; return what was printed, and the exit status."""
    os.environ["RANK"] = str(group.rank())
    screen = io.StringIO()

    def main() -> int:
        for _ in range(group.size() - 1 - group.rank()):
            dist.barrier()
        raise RuntimeError("a bug\nin lines")

    with (
        mock.patch.object(program.os, "_exit", sys.exit),
        contextlib.redirect_stderr(screen),
        pytest.raises(SystemExit) as exit,
    ):
        run_program(main)
    for _ in range(group.rank()):
        dist.barrier()
    return screen.getvalue(), exit.value.code


def test_the_rank_that_failed_first_shows_its_traceback():
    with RankPool(3) as ranks:
        first, *others = reversed(ranks.run(rank_fails))
    assert first[0].startswith("Traceback") and first[1] == 1
    for rank, (text, status) in zip((1, 0), others, strict=True):
        assert (text, status) == (f"rank {rank}: RuntimeError: a bug in lines\n", 1)
