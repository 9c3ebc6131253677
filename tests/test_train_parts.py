"""Parts of the training run: data order, learning rate, records, and layouts that must agree."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from flce_dist.launch.train_config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)
from flce_dist.launch.train_data import Corpus, load_corpus
from flce_dist.launch.train_log import RunLog, plot_loss_curve, read_metrics
from flce_dist.launch.train_optimizer import learning_rate
from flce_dist.launch.train_run import Trainer
from flce_dist.testing import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

VOCAB = 64
CONFIG = RunConfig(
    model=ModelConfig(
        hidden_size=16, num_layers=2, num_heads=2, ffn_hidden_size=16, seq_length=8, init_std=0.2
    ),
    data=DataConfig(batch_size=2, validation_batches=1),
    optimizer=OptimizerConfig(lr=0.02, warmup_steps=1, decay_steps=4),
)


def corpus(rows: int = 10) -> Corpus:
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(VOCAB, (rows + 2, 9), generator=generator)
    return Corpus(sequences[:rows], sequences[rows:], VOCAB, seed=1)


def test_each_pass_reads_every_sequence_once_in_an_order_of_its_own() -> None:
    data = corpus()
    passes = [data.train_batch(first, 10)[0] for first in (0, 10)]
    for order in passes:
        rows = sorted(map(tuple, order.tolist()))
        assert rows == sorted(map(tuple, data.train[:, :-1].tolist()))
    assert not torch.equal(*passes)


def test_a_batch_depends_on_the_position_alone() -> None:
    data = corpus()
    tokens, labels = data.train_batch(7, 6)  # across the end of a pass
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    parts = [data.train_batch(first, 2)[0] for first in (7, 9, 11)]
    assert torch.equal(tokens, torch.cat(parts))
    assert torch.equal(corpus().train_batch(7, 6)[0], tokens)


def test_the_real_text_has_a_real_vocabulary_and_a_validation_split() -> None:
    pytest.importorskip("mistral_common")
    data = load_corpus(RunConfig())
    assert data.vocab_size == 131_072
    assert len(data.train) > 300 and 10 < len(data.validation) < 40
    ids = torch.cat([data.train, data.validation])
    assert ids.shape[1] == 257 and 0 <= ids.min() and ids.max() < data.vocab_size
    assert ids.unique().numel() > 3000


def test_learning_rate_rises_falls_and_stays() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=12)
    assert [learning_rate(step, config) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert learning_rate(8, config) == pytest.approx(0.55)
    assert learning_rate(12, config) == learning_rate(99, config) == pytest.approx(0.1)
    flat = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=0, decay_steps=1)
    assert learning_rate(1, flat) == pytest.approx(0.1)


def test_a_continued_run_drops_records_beyond_its_step_and_a_line_cut_short(
    tmp_path: Path,
) -> None:
    log = RunLog(tmp_path, step=0, steps=5, head_mib=1.0)
    for step in range(1, 5):
        log.train(step, loss=10.0 - step, gradient_norm=1.0, tokens_per_s=1.0)
    log.validation(4, 6.5)
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5

    log = RunLog(tmp_path, step=2, steps=5, head_mib=1.0)
    log.train(3, loss=1.0, gradient_norm=1.0, tokens_per_s=1.0)
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [(json.loads(line)["step"], json.loads(line)["loss"]) for line in lines] == [
        (1, 9.0),
        (2, 8.0),
        (3, 1.0),
    ]
    plot_loss_curve(tmp_path)
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(1) as one, RankPool(2) as two, RankPool(4) as four:
        yield {1: one, 2: two, 4: four}


def rank_train(group: Any, config: RunConfig) -> list[float]:
    """Losses, gradient norms and validation loss of three steps."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    trainer = Trainer(config, corpus(), torch.device("cpu"))
    numbers = [number for _ in range(3) for number in trainer.train_step()]
    assert (trainer.step, trainer.samples) == (3, 12)
    return [*numbers, trainer.validate()]


def layout(tensor: int, data: int, sp: bool, **model: Any) -> RunConfig:
    """The same four sequences a step and two of validation, however many ranks share them."""
    return replace(
        CONFIG,
        model=replace(CONFIG.model, **model),
        data=replace(CONFIG.data, batch_size=4 // data, validation_batches=1),
        parallel=ParallelConfig(tensor=tensor, sequence_parallel=sp),
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_layout_trains_alike(pools: dict[int, RankPool], tied: bool) -> None:
    (alone,) = pools[1].run(rank_train, layout(1, 1, False, tie_embeddings=tied))
    assert alone[4] < alone[0] and min(alone) > 0
    for tensor, data, sp in [(2, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)]:
        config = layout(tensor, data, sp, tie_embeddings=tied)
        for numbers in pools[tensor * data].run(rank_train, config):
            assert numbers == pytest.approx(alone, rel=2e-4), (tensor, data, sp)


def test_bfloat16_trains_close_to_float32(pools: dict[int, RankPool]) -> None:
    for numbers, exact in zip(
        pools[2].run(rank_train, layout(2, 1, True, dtype="bfloat16")),
        pools[2].run(rank_train, layout(2, 1, True)),
        strict=True,
    ):
        assert numbers != exact
        assert numbers == pytest.approx(exact, rel=0.05)
