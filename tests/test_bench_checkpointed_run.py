"""What benchmarks of a training run's checkpoint do to its files: they move none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("tyro")
pytest.importorskip("rich")

from flce_dist.launch.bench.checkpointed_run import at_checkpoint
from flce_dist.launch.program import RunError
from flce_dist.launch.train.trainer import Trainer
from flce_dist.testing import RankPool
from tests.test_bench_mean_gradient import ALONE
from tests.test_train_filtered import spread_corpus
from tests.tiny_training import forget_earlier_runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CPU = torch.device("cpu")


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
