"""The learning rate over steps."""

import pytest

pytest.importorskip("megatron.core")

from flce_dist.launch.train.config import OptimizerConfig
from flce_dist.launch.train.optimizer import learning_rate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_learning_rate_rises_falls_and_stays() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=12)
    assert [learning_rate(step, config) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert learning_rate(8, config) == pytest.approx(0.55)
    assert learning_rate(12, config) == learning_rate(99, config) == pytest.approx(0.1)
    flat = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=0, decay_steps=1)
    assert learning_rate(1, flat) == pytest.approx(0.1)
