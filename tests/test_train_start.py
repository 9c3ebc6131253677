"""Ranks that the training program starts itself."""

import os
import signal
import sys
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

pytest.importorskip("tyro")

from flce_dist.launch.program import run_program
from flce_dist.launch.train import __main__ as train
from flce_dist.launch.train import ranks

TRAIN = "flce_dist.launch.train"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.hiden-size", "64"], "hiden-size"),
        (["--head.schedule", "fast"], "fast"),
        (["--model.num-heads", "6"], "error: model.hidden_size must be divisible"),
    ],
)
def test_one_rank_explains_what_is_wrong_and_exits_with_2(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_program(train.main)
    assert ended.value.code == 2
    assert message in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("ended", "status", "said"),
    [
        (None, 0, ""),
        (2, 2, ""),  # a rank has said why
        (143, 143, ""),
        (-9, 137, "error: rank 1 was killed by SIGKILL\n"),
        (SignalException("to the agent", signal.SIGTERM), 143, ""),
    ],
)
def test_ranks_started_here_end_as_the_first_one_that_failed(
    ended: Any,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def torchrun(arguments: list[str]) -> None:
        *options, code, launcher, module, first, second = arguments
        command = [sys.executable, "-u", "-c"]
        assert options == [*"--standalone --nproc-per-node 4 --no-python".split(), *command]
        assert (code, launcher) == (ranks.RANK, str(os.getpid()))
        assert (module, [first, second]) == (TRAIN, overrides)
        if isinstance(ended, int):
            failures = {1: ProcessFailure(1, 77, ended, "none")}
            raise ChildFailedError(TRAIN, failures)
        if ended is not None:
            raise ended

    overrides = ["--parallel.tensor", "4"]
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train", *overrides])
    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    monkeypatch.setattr(ranks.logging, "disable", lambda level: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert train.main() == status
    assert capsys.readouterr() == ("", said)
