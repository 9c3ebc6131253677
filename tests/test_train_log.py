"""What a run leaves: records and the loss curve; one run at a time writes."""

import fcntl
import json
import math
import os
import resource
import signal
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

from flce_dist.launch.program import RunError
from flce_dist.launch.train import lock
from flce_dist.launch.train.lock import LOCK, locked, this_run
from flce_dist.launch.train.log import RunLog, plot_loss_curve
from tests.processes import LAST_RESORT_S, forked


def test_a_continued_run_sets_aside_what_lies_beyond_its_step(tmp_path, capsys):
    log = RunLog(tmp_path, step=0, steps=5, head_mib=1.0)
    for step in range(1, 5):
        log.train(step, loss=10.0 - step, gradient_norm=1.0, tokens_per_s=1.0)
    log.validation(4, 6.5)
    log.close()
    path, cut = tmp_path / "metrics.jsonl", tmp_path / "metrics.cut.jsonl"
    with path.open("a") as file:
        file.write('garbage\n{"kind": "train", "st')  # the last line cut short by a kill
    before = path.read_text().splitlines()
    assert len(before) == 7 and "metrics.cut" not in capsys.readouterr().out

    for _ in range(2):  # once more with nothing to set aside
        log = RunLog(tmp_path, step=2, steps=5, head_mib=1.0)
        log.close()
        assert path.read_text().splitlines() == before[:2]
        assert cut.read_text().splitlines() == before[2:]
    said = f"5 lines beyond step 2, or damaged, moved from {path} to metrics.cut.jsonl"
    assert capsys.readouterr().out.count(said) == 1

    log = RunLog(tmp_path, step=1, steps=5, head_mib=1.0)
    assert "\n1 line beyond step 1, or damaged, moved" in "\n" + capsys.readouterr().out
    log.train(2, loss=1.0, gradient_norm=1.0, tokens_per_s=1.0)
    log.train(3, loss=math.inf, gradient_norm=math.nan, tokens_per_s=1.0)
    log.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in found] == [(1, 9.0), (2, 1.0), (3, None)]
    assert cut.read_text().splitlines() == before[2:] + before[1:2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_loss_curve(tmp_path)
        assert (tmp_path / "loss.png").stat().st_size > 1000
        path.write_text('{"kind": "train", "step": 1, "loss": null}\n')
        plot_loss_curve(tmp_path)


GOOD = '{"kind": "train", "step": 1, "loss": 2.5}'
DEEP = "[" * 100_000


@pytest.mark.parametrize("line", [
    GOOD.replace("kind", "kine"), GOOD.replace("train", "tsain"), GOOD.replace("2.5", "[]"),
    GOOD.replace('"step": 1', '"step": "1"'), "[1]", "\xff", DEEP,
])  # fmt: skip
def test_a_damaged_record_is_moved_at_a_start_and_named_by_the_figure(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(RunError, match=rf"^{path}:2 must be a record of this run, got b"):
        plot_loss_curve(tmp_path)
    RunLog(tmp_path, step=1, steps=5, head_mib=1.0).close()
    assert path.read_text() == f"{GOOD}\n"
    assert (tmp_path / "metrics.cut.jsonl").read_text() == f"{line}\n"
    plot_loss_curve(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.cut.jsonl", LOCK])
def test_a_fifo_in_place_of_a_file_of_a_run_is_an_error(tmp_path, name):
    (tmp_path / "metrics.jsonl").write_text("damaged\n")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunError, match=r"Not a regular file$"), locked(tmp_path):
        RunLog(tmp_path, step=1, steps=5, head_mib=1.0)


def hold_until_killed(pipe: Connection, folder: Path) -> None:
    with locked(folder):
        pipe.send(os.getpid())
        signal.pause()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads
def test_a_second_run_is_told_who_holds_the_folder_until_that_is_killed(tmp_path, capsys):
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


def test_a_run_that_starts_at_the_same_instant_is_named_once_it_has_said_who_it_is(
    tmp_path, monkeypatch
):
    path = tmp_path / LOCK
    says_so_at = 3
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == says_so_at:
            path.write_text(json.dumps({"pid": 7, "host": "here", "since": "now"}))

    monkeypatch.setattr(lock, "time", SimpleNamespace(sleep=pause))
    with path.open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="in use by process 7 on here, started now; wait for"):
            with locked(tmp_path):
                pass
        assert len(pauses) == says_so_at
        path.write_text("")
        says_so_at = 0
        with pytest.raises(RunError, match="in use by a run that is starting or ending; wait for"):
            with locked(tmp_path):
                pass


def lock_without_disk(pipe: Connection, folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        with locked(folder):
            pipe.send("locked")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def test_a_lock_that_cannot_be_written_is_one_error(tmp_path):
    process, pipe = forked(lock_without_disk, tmp_path)
    assert pipe.poll(LAST_RESORT_S)
    assert pipe.recv() == f"RunError: cannot write {tmp_path / LOCK}: File too large"
    process.join()


@pytest.mark.parametrize("changes, job, refused", [
    ({}, "", "held by process 7 on elsewhere, started then, and "),
    ({}, "12", "held by process 7 on elsewhere"),
    ({"slurm_job": "12"}, "12", None),  # requeued on other nodes
    ({"boot": this_run()["boot"]}, "", None),  # another container of this machine
    ({"host": this_run()["host"]}, "", None),  # this machine before it was started anew
    ("[", "", r"an unknown run \(run.lock cannot be read\)"),
    (DEEP, "", r"an unknown run \(run.lock cannot be read\)"),
])  # fmt: skip
def test_what_was_held_on_another_machine_is_refused(tmp_path, monkeypatch, changes, job, refused):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    owner = {"pid": 7, "host": "elsewhere", "since": "then", "boot": "other", "slurm_job": None}
    path = tmp_path / LOCK
    path.write_text(changes if isinstance(changes, str) else json.dumps(owner | changes))
    before = path.read_text()
    if refused is not None:
        with pytest.raises(RunError, match=refused) as error, locked(tmp_path):
            pass
        assert f"If it does not, remove {path}" in str(error) and path.read_text() == before
        path.unlink()
    with locked(tmp_path):
        pass
