"""What benchmarks of a training run's checkpoint do to files: they replace one, and move none."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("tyro")
pytest.importorskip("rich")

from flce_dist.launch.bench.checkpointed_run import at_checkpoint, write_json
from flce_dist.launch.program import RunError
from flce_dist.launch.train.trainer import Trainer
from flce_dist.testing import RankPool
from tests.test_bench_mean_gradient import ALONE
from tests.test_train_filtered import spread_corpus
from tests.tiny_training import forget_earlier_runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CPU = torch.device("cpu")


def test_a_full_disk_leaves_the_last_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found.json"
    write_json(path, {"branches": [1]})
    before = path.read_text()

    def half(self: Path, text: str) -> None:
        self.write_bytes(text[:5].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(RunError, match=r"cannot write .*found\.json: No space left on device"):
        write_json(path, {"branches": [1, 2]})
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def rank_damaged(group: Any, out_dir: Path) -> str:
    """What is said to a run that may start anew, and whose only checkpoint is damaged."""
    config = replace(ALONE, out_dir=out_dir, anew_if_damaged=True)
    forget_earlier_runs()
    Trainer(config, spread_corpus(), CPU).save()
    (out_dir / "checkpoints" / "step-00000000" / "manifest.json").write_text("{}")
    forget_earlier_runs()
    with pytest.raises(RunError) as error:
        at_checkpoint(config, spread_corpus(), CPU)
    return str(error.value)


def test_a_damaged_checkpoint_stays(tmp_path: Path) -> None:
    with RankPool(1) as pool:
        (message,) = pool.run(rank_damaged, tmp_path)
    assert "step 0 is damaged" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000000"]
