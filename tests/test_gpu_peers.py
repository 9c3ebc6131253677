"""Peer memory over CUDA itself, by two processes on one GPU: gpu_peers.py."""

import signal
import sys
from contextlib import ExitStack

import pytest

from tests.gpu_peers import ABORTS, CASES, IN_VAIN, P
from tests.processes import started


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_two_processes_on_one_gpu(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    command = [sys.executable, "-m", "tests.gpu_peers", name]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started([*command, str(rank), str(tmp_path / "store")], tmp_path / str(rank))
            )
            for rank in range(P)
        ]
        ended = [rank.finish() for rank in ranks]
    statuses, outputs = [one[0][0] for one in ended], [one[1][0] for one in ended]
    printed = "\n".join(outputs)
    assert statuses == [-signal.SIGABRT if name in ABORTS else 0, 0], printed
    assert "found: " not in printed and (name not in ABORTS or IN_VAIN in outputs[0]), printed
