"""No rank outlives its torchrun."""

import ctypes
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from flce_dist.launch.train.ranks import RANK, end_with_torchrun, is_orphan
from tests.processes import LAST_RESORT_S, forked

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads


PR_GET_PDEATHSIG = 2  # linux/prctl.h


def be_torchrun(pipe: Connection) -> None:
    """Start a rank and wait for ever; the rank alone keeps the pipe open."""
    if os.fork() == 0:
        os.environ["TORCHELASTIC_RUN_ID"] = "1"
        end_with_torchrun()
        pipe.send(os.getpid())
        signal.pause()
    pipe.close()
    signal.pause()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_rank_ends_when_its_torchrun_is_killed() -> None:
    torchrun, pipe = forked(be_torchrun)
    assert pipe.poll(LAST_RESORT_S)
    rank = pipe.recv()
    torchrun.kill()
    ended = pipe.poll(LAST_RESORT_S)  # the kernel closed the rank's end
    if not ended:
        os.kill(rank, signal.SIGKILL)
    assert ended


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_what_another_launcher_starts_may_outlive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before, after = ctypes.c_int(-1), ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(before))
    end_with_torchrun()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(after))
    assert after.value == before.value != signal.SIGKILL


def test_who_is_an_orphan(tmp_path: Path) -> None:
    command = tmp_path / "1" / "cmdline"
    command.parent.mkdir()
    command.write_bytes(b"/sbin/init\0")
    assert is_orphan(1, tmp_path) and not is_orphan(2, tmp_path)
    for torchrun in (
        b"/usr/bin/python3\0/usr/bin/torchrun\0",
        b"python\0-m\0torch.distributed.run",
    ):
        command.write_bytes(torchrun)
        assert not is_orphan(1, tmp_path)
    command.unlink()
    assert is_orphan(1, tmp_path)


STUB = """\
import ctypes, os, sys
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))
print(number.value, "torch" in sys.modules, *sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_rank_ends_with_its_launcher_before_it_imports_anything(tmp_path: Path) -> None:
    (tmp_path / "stub.py").write_text(STUB)

    def started_by(launcher: int) -> tuple[int, str]:
        command = [sys.executable, "-c", RANK, str(launcher), "stub", "--steps", "3"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return ended.returncode, ended.stdout

    assert started_by(os.getpid()) == (0, f"{int(signal.SIGKILL)} False --steps 3\n")
    assert started_by(os.getppid()) == (128 + signal.SIGKILL, "")  # its own was killed before
