"""Ranks: how the training program starts its own, and that none outlives who started it."""

import ctypes
import os
import signal
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

pytest.importorskip("tyro")

from flce_dist.launch.program import run_program
from flce_dist.launch.train import __main__ as train
from flce_dist.launch.train.ranks import RANK, end_with_torchrun, is_orphan

TRAIN = "flce_dist.launch.train"
KILLED = "error: rank 1 was killed by SIGKILL\n"
ANEW = "\nstopped; the same command starts at step 0\n"
AT_20 = "\nstopped; the same command continues {}/checkpoints/step-00000020\n"
SILENT = "error: rank 0 ended with status 7 and did not say why\n"
PR_GET_PDEATHSIG = 2  # linux/prctl.h
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--model.hiden-size", "64"], "hiden-size"),
    (["--head.schedule", "fast"], "fast"),
    (["--model.num-heads", "6"], "error: model.hidden_size must be divisible"),
])  # fmt: skip
def test_what_is_wrong_is_said_before_ranks_start(arguments, message, monkeypatch, capfd):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_program(train.main)
    assert ended.value.code == 2
    assert message in "".join(capfd.readouterr())


def failed(*statuses: int, said_why: str = "") -> ChildFailedError:
    """The end of ranks in this order, which a rank explains in a file of its own, or not."""
    failures = {}
    for rank, status in enumerate(statuses):
        failures[rank] = ProcessFailure(rank, 77, status, "")
        failures[rank].error_file = said_why or failures[rank].error_file
        failures[rank].timestamp = rank
    return ChildFailedError(TRAIN, failures)


@pytest.mark.parametrize(("ended", "status", "said", "steps"), [
    (None, 0, "", []),
    (failed(2, said_why=__file__), 2, "", []),
    (failed(7, -15), 7, SILENT, []),
    (failed(1, -9, said_why=__file__), 137, KILLED + ANEW, []),  # rank 0 misses it
    (failed(-15, -9, said_why=__file__), 137, KILLED + ANEW, []),
    (SignalException("to the agent", signal.SIGTERM), 143, ANEW, []),
    (SignalException("to the agent", signal.SIGINT), 130, AT_20, ["10", "20"]),
])  # fmt: skip
def test_ranks_started_here_end_as_the_first_that_failed(
    ended, status, said, steps, tmp_path, monkeypatch, capsys
):
    for step in steps:
        (tmp_path / "checkpoints" / f"step-000000{step}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000030.tmp").mkdir(parents=True)

    def torchrun(arguments: list[str]) -> None:
        assert arguments[:3] == ["--standalone", "--nproc-per-node", "4"]
        assert arguments[-6:] == [str(os.getpid()), TRAIN, *overrides]
        if ended is not None:
            raise ended

    overrides = ["--parallel.tensor", "4", "--out-dir", str(tmp_path)]
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train", *overrides])
    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    monkeypatch.setattr("logging.disable", lambda level: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert train.main() == status
    assert capsys.readouterr() == ("", said.format(tmp_path))


STUB = """\
import ctypes, os, sys
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))
print(number.value, "torch" in sys.modules, *sys.argv[1:])
"""


@on_linux
def test_a_rank_ends_with_its_launcher_before_it_imports_anything(tmp_path):
    (tmp_path / "stub.py").write_text(STUB)

    def started_by(launcher: int) -> tuple[int, str]:
        command = [sys.executable, "-c", RANK, str(launcher), "stub", "--steps", "3"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return ended.returncode, ended.stdout

    assert started_by(os.getpid()) == (0, f"{int(signal.SIGKILL)} False --steps 3\n")
    assert started_by(os.getppid()) == (128 + signal.SIGKILL, "")  # its own was killed before


@on_linux
def test_what_another_launcher_starts_may_outlive_it(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before, after = ctypes.c_int(-1), ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(before))
    end_with_torchrun()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(after))
    assert after.value == before.value != signal.SIGKILL


@pytest.mark.parametrize(("parent", "command", "orphan"), [
    (2, b"/sbin/init\0", False),
    (1, b"/sbin/init\0", True),
    (1, None, True),
    (1, b"/usr/bin/python3\0/usr/bin/torchrun\0", False),
    (1, b"python\0-m\0torch.distributed.run", False),
])  # fmt: skip
def test_who_is_an_orphan(parent, command, orphan, tmp_path):
    (tmp_path / "1").mkdir()
    if command is not None:
        (tmp_path / "1" / "cmdline").write_bytes(command)
    assert is_orphan(parent, tmp_path) == orphan
