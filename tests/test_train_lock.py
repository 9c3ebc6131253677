"""One run at a time writes into a folder."""

import json
import os
import re
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from flce_dist.launch.program import RunError
from flce_dist.launch.train.lock import LOCK, held, locked, this_run
from flce_dist.testing import RankPool
from tests.processes import LAST_RESORT_S, forked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads


def hold_until_killed(pipe: Connection, folder: Path) -> None:
    with locked(folder, print):
        pipe.send(os.getpid())
        signal.pause()


def test_a_second_run_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    said: list[str] = []
    with locked(tmp_path / "run", said.append):
        with pytest.raises(RunError) as error, locked(tmp_path / "run", said.append):
            pass
        assert f"run is in use by process {os.getpid()} on {os.uname().nodename}, " in str(error)
    for _ in range(2):
        with locked(tmp_path / "run", said.append):
            pass
    assert said == []


def test_what_a_killed_run_held_is_taken_over_with_a_word(tmp_path: Path) -> None:
    process, pipe = forked(hold_until_killed, tmp_path)
    assert pipe.poll(LAST_RESORT_S)
    pid = pipe.recv()
    with pytest.raises(RunError, match=f"in use by process {pid} "), locked(tmp_path, print):
        pass
    process.kill()
    process.join()
    said: list[str] = []
    with locked(tmp_path, said.append):
        (message,) = said
        assert f"process {pid} on " in message and message.endswith("taking it over")
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    "changes, job, refused",
    [
        ({}, "", "held by process 7 on elsewhere, started then, and "),
        ({}, "12", "held by process 7 on elsewhere"),
        ({"slurm_job": "12"}, "12", None),  # requeued on other nodes
        ({"boot": this_run()["boot"]}, "", None),  # another container of this machine
        ({"host": this_run()["host"]}, "", None),  # this machine before it was started anew
        ({"host": None}, "", "held by process 7 on None"),
        (None, "", r"an unknown run \(run.lock cannot be read\)"),
    ],
)
def test_what_was_held_on_another_machine_is_refused(
    tmp_path: Path, monkeypatch: Any, changes: dict[str, Any] | None, job: str, refused: str | None
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    owner = {"pid": 7, "host": "elsewhere", "since": "then", "boot": "other", "slurm_job": None}
    path = tmp_path / LOCK
    path.write_text("[" if changes is None else json.dumps(owner | changes))
    before, said = path.read_text(), list[str]()
    if refused is None:
        with locked(tmp_path, said.append):
            assert len(said) == 1
        return
    with pytest.raises(RunError, match=refused) as error, locked(tmp_path, said.append):
        pass
    assert f"If it does not, remove {path}" in str(error) and path.read_text() == before
    path.unlink()
    with locked(tmp_path, said.append):
        assert said == []


def rank_hold(group: Any, folder: Path) -> str:
    try:
        with held(folder):
            return "held"
    except RunError as error:
        return str(error)


def test_all_ranks_end_with_what_rank_0_found(tmp_path: Path) -> None:
    with RankPool(2) as ranks:
        with locked(tmp_path, print):
            first, second = ranks.run(rank_hold, tmp_path)
            assert first == second and "is in use by process" in first
        assert ranks.run(rank_hold, tmp_path) == ["held"] * 2
        (tmp_path / "file").write_text("in the way")
        first, second = ranks.run(rank_hold, tmp_path / "file")
        assert first == second
        assert re.match(r"cannot write .*/run\.lock: .*/file is not a directory$", first)
