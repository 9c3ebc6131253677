"""One run at a time writes into a folder."""

import json
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from flce_dist.launch.program import RunError
from flce_dist.launch.train.lock import LOCK, locked, this_run
from tests.processes import LAST_RESORT_S, forked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads


def hold_until_killed(pipe: Connection, folder: Path) -> None:
    with locked(folder):
        pipe.send(os.getpid())
        signal.pause()


def test_a_second_run_is_told_who_holds_the_folder_and_takes_it_over_once_that_is_killed(
    tmp_path, capsys
):
    folder = tmp_path / "run"
    for _ in range(2):  # given back, it is taken without a word
        with locked(folder):
            pass
    process, pipe = forked(hold_until_killed, folder)
    assert pipe.poll(LAST_RESORT_S)
    owner = f"process {pipe.recv()} on {os.uname().nodename}, "
    with pytest.raises(RunError, match=f"run is in use by {owner}"), locked(folder):
        pass
    process.kill()
    process.join()
    assert capsys.readouterr().err == ""
    with locked(folder):
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
    said = capsys.readouterr().err
    assert said.startswith(owner) and said.endswith("taking it over\n")


@pytest.mark.parametrize(
    "changes, job, refused",
    [
        ({}, "", "held by process 7 on elsewhere, started then, and "),
        ({}, "12", "held by process 7 on elsewhere"),
        ({"slurm_job": "12"}, "12", None),  # requeued on other nodes
        ({"boot": this_run()["boot"]}, "", None),  # another container of this machine
        ({"host": this_run()["host"]}, "", None),  # this machine before it was started anew
        (None, "", r"an unknown run \(run.lock cannot be read\)"),
    ],
)
def test_what_was_held_on_another_machine_is_refused(tmp_path, monkeypatch, changes, job, refused):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    owner = {"pid": 7, "host": "elsewhere", "since": "then", "boot": "other", "slurm_job": None}
    path = tmp_path / LOCK
    path.write_text("[" if changes is None else json.dumps(owner | changes))
    before = path.read_text()
    if refused is not None:
        with pytest.raises(RunError, match=refused) as error, locked(tmp_path):
            pass
        assert f"If it does not, remove {path}" in str(error) and path.read_text() == before
        path.unlink()
    with locked(tmp_path):
        pass
