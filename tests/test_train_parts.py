"""Parts of the training run: data order, learning rate, records, and layouts that must agree."""

import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from flce_dist.launch.program import RunError
from flce_dist.launch.train.checkpoint import load, newest_whole
from flce_dist.launch.train.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    flatten,
    resume_conflicts,
)
from flce_dist.launch.train.data import Corpus, load_corpus
from flce_dist.launch.train.log import RunLog, plot_loss_curve, read_metrics
from flce_dist.launch.train.optimizer import learning_rate
from flce_dist.launch.train.run import Trainer, run
from flce_dist.launch.yaml_config import ConfigError
from flce_dist.testing import RankFailed, RankPool
from tests.tiny_training import records

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


def test_a_text_is_known_by_its_digest_wherever_it_lies(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")

    def identity(name: str, content: bytes) -> dict[str, Any]:
        (tmp_path / name).write_bytes(content)
        config = replace(CONFIG, data=replace(CONFIG.data, text=tmp_path / name))
        return flatten(config) | load_corpus(config).sources

    text = b"In the beginning was the text. " * 20
    here, moved, other = identity("a", text), identity("b", text), identity("a", text + b"!")
    assert resume_conflicts(here, moved) == []
    (conflict,) = resume_conflicts(moved, other)
    key = "data.text.sha256"
    assert conflict == (
        f"{key} is '{here[key]}' (of {tmp_path}/b) there and '{other[key]}' (of {tmp_path}/a) here"
    )
    with pytest.raises(ConfigError, match=r"/c:1: must be UTF-8, got byte 0xff"):
        identity("c", b"abc\xff")


def test_learning_rate_rises_falls_and_stays() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=12)
    assert [learning_rate(step, config) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert learning_rate(8, config) == pytest.approx(0.55)
    assert learning_rate(12, config) == learning_rate(99, config) == pytest.approx(0.1)
    flat = OptimizerConfig(lr=1.0, min_lr=0.1, warmup_steps=0, decay_steps=1)
    assert learning_rate(1, flat) == pytest.approx(0.1)


def test_a_continued_run_sets_aside_what_lies_beyond_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    said = f"5 lines beyond step 2 moved from {path} to metrics.cut.jsonl"
    assert capsys.readouterr().out.count(said) == 1

    log = RunLog(tmp_path, step=1, steps=5, head_mib=1.0)
    log.train(2, loss=1.0, gradient_norm=1.0, tokens_per_s=1.0)
    log.train(3, loss=math.inf, gradient_norm=math.nan, tokens_per_s=1.0)
    log.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 9.0), (2, 1.0), (3, None)]
    assert cut.read_text().splitlines() == before[2:] + before[1:2]
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


def rank_resume(group: Any, config: RunConfig) -> tuple[list[float], list[float], int]:
    """Numbers of steps 3 and 4 without a pause and after one; tensors in this rank's file."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    first = Trainer(config, corpus(), torch.device("cpu"))
    assert first.resume() is None
    for _ in range(2):
        first.train_step()
    first.save()
    expected = [number for _ in range(2) for number in first.train_step()]

    parallel_state.destroy_model_parallel()
    again = Trainer(config, corpus(), torch.device("cpu"))
    checkpoint = again.resume()
    assert checkpoint is not None and (again.step, again.samples) == (2, 8)
    resumed = [number for _ in range(2) for number in again.train_step()]
    return expected, resumed, len(load(checkpoint, group.rank()))


@pytest.mark.parametrize(
    "tensor, data, dtype", [(2, 1, "float32"), (1, 2, "float32"), (2, 1, "bfloat16")]
)
def test_a_resumed_run_makes_the_same_steps(
    pools: dict[int, RankPool], tmp_path: Path, tensor: int, data: int, dtype: str
) -> None:
    config = replace(layout(tensor, data, tensor > 1, dtype=dtype), out_dir=tmp_path)
    files = []
    for expected, resumed, tensors in pools[2].run(rank_resume, config):
        assert resumed == expected
        files.append(tensors)
    assert files[0] > 20 and files[1] == (files[0] if data == 1 else 1)  # replicas: generators only


def rank_refusals(group: Any, config: RunConfig) -> list[str]:
    """What each rank says to checkpoints of another configuration, another model, and damaged."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    trainer = Trainer(config, corpus(), torch.device("cpu"))
    trainer.save()
    messages = []

    def refused() -> None:
        with pytest.raises(RunError) as error:
            trainer.resume()
        messages.append(str(error.value))

    trainer.identity["seed"] = 0
    refused()
    trainer.identity["seed"] = config.seed
    name, parameter = trainer.optimizer.parameters.popitem()
    refused()
    trainer.optimizer.parameters[name] = parameter
    if group.rank() == 0:
        (trainer.checkpoints / "step-00000000" / "manifest.json").write_text("")
    refused()
    trainer.config = replace(config, anew_if_damaged=True)
    assert trainer.resume() is None
    parallel_state.destroy_model_parallel()
    texts = replace(corpus(), sources={"data.text.sha256": str(group.rank())})
    with pytest.raises(RunError, match=r"data\.text must be the same on all ranks, got .*0.*1"):
        Trainer(config, texts, torch.device("cpu"))
    return messages


def test_a_checkpoint_that_cannot_be_continued_is_refused_on_every_rank(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    config = replace(layout(2, 1, True), out_dir=tmp_path)
    first, second = pools[2].run(rank_refusals, config)
    assert first == second
    conflict, model, damaged = first
    assert conflict.startswith("cannot continue ") and "seed is 1234 there and 0 here" in conflict
    assert "another model, which differs in model.decoder.final_layernorm.weight" in model
    assert "step 0 is damaged: manifest.json cannot be read" in damaged
    assert (tmp_path / "checkpoints" / "step-00000000.bad").is_dir()


NAME = "decoder.final_layernorm.weight"
RUN = replace(CONFIG, steps=6, validate_every=2, checkpoint_every=2, compare=False)


def rank_run(group: Any, out_dir: Path, event: str = "") -> int | str:
    """The whole loop; ``event`` happens to one rank between steps 2 and 3, or in a save."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    train, validation, save = Trainer.train_step, RunLog.validation, Trainer.save
    loss_of = Trainer._loss

    def terminate() -> None:
        if group.rank() == 1 and "SIGTERM" in event:
            os.kill(os.getpid(), signal.SIGTERM)

    def train_step(trainer: Trainer, *, stop: bool) -> tuple[float, float]:
        numbers = train(trainer, stop=stop)
        if trainer.step == 2:
            terminate()
        return numbers

    def full_disk(log: RunLog, step: int, loss: float) -> None:
        validation(log, step, loss)
        if event == "full disk":
            log._file = open("/dev/full", "a", buffering=1)

    def save_and_terminate(trainer: Trainer) -> None:
        if trainer.stopping and event == "SIGTERM twice":
            terminate()
        if trainer.step == 4 and group.rank() == 1 and event == "state":
            trainer.optimizer.adamw.state[trainer.optimizer.masters[NAME]]["exp_avg"][0] = math.nan
        save(trainer)

    def loss(trainer: Trainer, *batch: torch.Tensor) -> torch.Tensor:
        factor = {"loss": math.nan, "gradient norm": 1e30}.get(event, 1.0)
        validates = not torch.is_grad_enabled()
        if event == "validation loss" and validates:
            factor = math.inf
        now = trainer.step == (4 if validates else 2) and group.rank() == 1
        return loss_of(trainer, *batch) * (factor if now else 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        patch.setattr(Trainer, "save", save_and_terminate)
        patch.setattr(RunLog, "validation", full_disk)
        patch.setattr(Trainer, "_loss", loss)
        try:
            return run(replace(RUN, out_dir=out_dir), corpus(), torch.device("cpu"))
        except RunError as error:
            return str(error)


def test_sigterm_to_one_rank_saves_and_ends_all_and_the_run_goes_on(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    calm, stopped = tmp_path / "calm", tmp_path / "stopped"
    assert pools[2].run(rank_run, calm) == [0, 0]
    assert pools[2].run(rank_run, stopped, "SIGTERM") == [143, 143]
    saved = sorted(path.name for path in (stopped / "checkpoints").iterdir())
    assert saved == ["step-00000002", "step-00000003"]
    assert max(record["step"] for record in records(stopped)) == 3
    assert pools[2].run(rank_run, stopped) == [0, 0]
    assert records(stopped) == records(calm)
    assert not (stopped / "metrics.cut.jsonl").exists()


def test_a_second_sigterm_ends_the_save(pools: dict[int, RankPool], tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 was killed by SIGTERM"):
        pools[2].run(rank_run, tmp_path, "SIGTERM twice")
    newest = newest_whole(tmp_path / "checkpoints", print)
    assert newest is not None and newest.position.step == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_record_that_cannot_be_written_is_one_error_on_all_ranks(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    first, second = pools[2].run(rank_run, tmp_path, "full disk")
    assert first == second
    assert str(first).startswith(f"cannot write {tmp_path}/metrics.jsonl: No space left on device;")
    newest = newest_whole(tmp_path / "checkpoints", print)
    assert newest is not None and newest.position.step == 4


@pytest.mark.parametrize(
    ("event", "step", "said"),
    [
        ("loss", 3, "loss is nan, gradient norm is nan"),
        ("gradient norm", 3, "gradient norm is inf"),
        ("validation loss", 4, "validation loss is inf"),
        ("state", 4, f"optimizer.{NAME}.exp_avg is nan"),
    ],
)
def test_a_number_that_is_not_finite_on_one_rank_stops_all_before_they_save(
    pools: dict[int, RankPool], tmp_path: Path, event: str, step: int, said: str
) -> None:
    first, second = pools[2].run(rank_run, tmp_path, event)
    assert first == second and str(first).startswith(f"step {step}: {said}, so the run stops")
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == ["step-00000002"]

    def no_json(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line, parse_constant=no_json) for line in lines][-1]
    assert last["step"] == step and (last["loss"] is None) == (event.endswith("loss"))
