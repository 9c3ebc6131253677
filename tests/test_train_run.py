"""Training steps on simulated ranks: layouts that must agree, resuming, broken numbers."""

import contextlib
import errno
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")  # before ranks are forked
pytest.importorskip("tyro")

from torch.utils.tensorboard import SummaryWriter

from flce_dist.launch.program import RunError
from flce_dist.launch.train.checkpoint import newest_whole
from flce_dist.launch.train.compare import head_peak_mib
from flce_dist.launch.train.config import TEXT_SHA256, HeadConfig, ParallelConfig, RunConfig
from flce_dist.launch.train.data import Corpus
from flce_dist.launch.train.log import RunLog
from flce_dist.launch.train.run import Trainer, run
from flce_dist.testing import RankPool, relative_rms
from tests.on_ranks import on_ranks
from tests.tiny_training import CONFIG, VOCAB, corpus, forget_earlier_runs, records

Trained = tuple[list[float], dict[str, torch.Tensor]]


def trainer_of(config: RunConfig, text: str = "one") -> Trainer:
    forget_earlier_runs()
    texts = replace(corpus(), sources={TEXT_SHA256: text}, prompt_tokens=config.data.prompt_tokens)
    return Trainer(config, texts, torch.device("cpu"))


def steps_of(trainer: Trainer, steps: int) -> list[float]:
    return [number for _ in range(steps) for number in trainer.train_step().values()]


def rank_train(group: Any, config: RunConfig) -> Trained:
    """Losses, gradient norms and validation loss of two steps; then all rows of all weights."""
    trainer = trainer_of(config)
    # Megatron's fused loss is compiled; its functions are the same without.
    with torch.compiler.set_stance("force_eager"):
        head_peak_mib(trainer.head_alone(), is_ours=config.head.is_ours)  # leaves no trace
        numbers = [*steps_of(trainer, 2), trainer.validate()]
    assert (trainer.step, trainer.samples) == (2, 8)
    weights = {}
    for name, weight in trainer.model.named_parameters():
        shards = [weight.detach()]
        if getattr(weight, "tensor_model_parallel", False):
            shards = [torch.empty_like(weight) for _ in range(config.parallel.tensor)]
            torch.distributed.all_gather(shards, weight.detach(), group=trainer.tensor_group)
        weights[name] = torch.cat(shards, getattr(weight, "partition_dim", 0))
    return numbers, weights


def layout(tensor: int, ranks: int, sp: bool, microbatches: int = 1, **model: Any) -> RunConfig:
    """The same four sequences a step and of validation, however many ranks share them."""
    size = 4 // ranks // microbatches
    data = replace(
        CONFIG.data, batch_size=size, microbatches=microbatches, validation_batches=microbatches
    )
    parallel = ParallelConfig(tensor=tensor, sequence_parallel=sp)
    return replace(CONFIG, model=replace(CONFIG.model, **model), data=data, parallel=parallel)


def assert_alike(
    trained: Trained, expected: Trained, *, numbers: float = 2e-4, weights: float = 1e-4
) -> None:
    assert trained[0] == pytest.approx(expected[0], rel=numbers)
    assert trained[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        assert relative_rms(trained[1][name], weight) < weights, name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_layout_trains_alike(pools, tied):
    (alone,) = pools[1].run(rank_train, layout(1, 1, False, tie_embeddings=tied))
    loss, *_, validation = alone[0]
    assert min(alone[0]) > 0 and validation == pytest.approx(loss, rel=0.5)  # both of a token
    for tensor, data, sp, microbatches in [(2, 1, False, 1), (1, 2, False, 2), (2, 2, True, 2)]:
        config = layout(tensor, data, sp, microbatches, tie_embeddings=tied)
        for trained in pools[tensor * data].run(rank_train, config):
            assert_alike(trained, alone)


@pytest.fixture(scope="module")
def exact(ranks: RankPool) -> list[Trained]:
    return ranks.run(rank_train, layout(2, 1, True, microbatches=2))


@pytest.mark.parametrize("head, numbers, weights", [
    ({"schedule": "in_forward"}, 2e-4, 1e-4),
    ({"schedule": "recompute"}, 2e-4, 1e-4),
    ({"kind": "megatron_unfused"}, 2e-4, 1e-4),
    # Megatron's fused loss rounds the gradient of fp32 logits, too, to bf16.
    ({"kind": "megatron_fused"}, 4e-3, 3e-2),
], ids=str)  # fmt: skip
def test_every_head_trains_alike(ranks, exact, head, numbers, weights):
    other = replace(layout(2, 1, True, microbatches=2), head=HeadConfig(**head))
    for trained, expected in zip(ranks.run(rank_train, other), exact, strict=True):
        assert_alike(trained, expected, numbers=numbers, weights=weights)


def test_prompts_are_ignored_by_every_head(ranks, exact):
    config = layout(2, 1, True, microbatches=2)
    config = replace(config, data=replace(config.data, prompt_tokens=5))
    skipping, theirs = (
        ranks.run(rank_train, replace(config, head=HeadConfig(**head)))
        for head in ({"skip_ignored": True}, {"kind": "megatron_unfused"})
    )
    for trained, expected, of_all in zip(skipping, theirs, exact, strict=True):
        assert_alike(trained, expected, numbers=2e-4, weights=1e-4)
        assert abs(trained[0][0] - of_all[0][0]) > 1e-3


def test_bfloat16_trains_close_to_float32(ranks, exact):
    config = layout(2, 1, True, microbatches=2, dtype="bfloat16")
    found = ranks.run(rank_train, config)
    for (numbers, weights), (expected, _) in zip(found, exact, strict=True):
        assert numbers != expected and weights.popitem()[1].dtype == torch.bfloat16
        assert numbers == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tensor, data", [(2, 1), (1, 2)])
@on_ranks(2)
def test_a_resumed_run_makes_the_same_steps(group, tmp_path, tensor, data, dtype):
    """And another model or text is refused."""
    config = replace(layout(tensor, data, tensor > 1, dtype=dtype), out_dir=tmp_path)
    first = trainer_of(config)
    layer: Any = first.model.output_layer
    assert layer.gradient_accumulation_fusion  # dweight goes to main_grad
    assert first.resume() is None
    steps_of(first, 2)
    first.save()
    expected = steps_of(first, 2)

    again = trainer_of(config)
    checkpoint = again.resume()
    assert checkpoint is not None and (again.step, again.samples) == (2, 8)
    assert steps_of(again, 2) == expected
    names = list(checkpoint.load(group.rank()))
    copies = [name for name in names if name.startswith("model.")]
    assert len(copies) == (8 if data == 1 or group.rank() == 0 else 0)
    kinds = {name.rsplit(".")[-1] for name in names if name.startswith("optimizer.")}
    assert kinds == {"step", "exp_avg", "exp_avg_sq", "fp32"}

    again.optimizer.parameters.popitem()
    with pytest.raises(RunError, match=r"another model, .* in model\.decoder\.final_layer"):
        again.resume()
    with pytest.raises(RunError, match=r"^cannot continue .* 'one' .* and 'other' \(of the manual"):
        trainer_of(config, "other").resume()


RUN = replace(CONFIG, steps=6, validate_every=2, checkpoint_every=2, compare=False)


def rank_run(group: Any, out_dir: Path, event: str) -> tuple[str, str]:
    """How the loop ends, and the screen then; ``event`` happens to one rank at one step."""
    forget_earlier_runs()
    validation, losses_of = RunLog.validation, Trainer._mean_loss

    end = SummaryWriter.close

    def cannot_end(events: Any) -> None:
        end(events)
        if event.endswith("end"):
            raise OSError(errno.ENOSPC, "No space left on device")

    def full_disk(log: RunLog, *record: Any) -> None:
        validation(log, *record)
        if event == "full disk" and record[0] == 2:
            log._file = open("/dev/full", "a", buffering=1)

    def losses(trainer: Trainer, *batch: torch.Tensor) -> torch.Tensor:
        factor = {"loss": math.nan, "gradient norm": 1e30}.get(event.split(",")[0], 1.0)
        validates = not torch.is_grad_enabled()
        if event == "validation loss" and validates:
            factor = math.inf
        now = trainer.step == (4 if validates else 2) and group.rank() == 1
        return losses_of(trainer, *batch) * (factor if now else 1.0)

    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(screen):
        patch.setattr(RunLog, "validation", full_disk)
        patch.setattr(Trainer, "_mean_loss", losses)
        patch.setattr(SummaryWriter, "close", cannot_end)
        try:
            run(replace(RUN, out_dir=out_dir), corpus(), torch.device("cpu"))
        except RunError as error:  # here the log still exists, as where the error is printed
            return str(error), screen.getvalue()
    return "no error", ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_record_that_cannot_be_written_is_one_error_on_all_ranks(ranks, tmp_path):
    (first, screen), (second, nothing) = ranks.run(rank_run, tmp_path, "full disk")
    assert first == second
    assert first.startswith(f"cannot write {tmp_path}/metrics.jsonl: No space left on device;")
    newest = newest_whole(tmp_path / "checkpoints", print)
    assert newest is not None and newest.step == 2
    # The error begins a line of its own, below the progress bar.
    assert "4/6 [" in screen.rpartition("\r")[2] and screen.endswith("\n") and nothing == ""


@pytest.mark.parametrize(("event", "said"), [
    ("end", "cannot write {}/tensorboard: No space left on device"),
    ("loss, end", "step 3: loss is nan, "),
])  # fmt: skip
def test_an_error_at_the_end_of_the_log_is_one_on_all_ranks_and_hides_none(
    ranks, tmp_path, event, said
):
    (first, _), (second, _) = ranks.run(rank_run, tmp_path, event)
    assert first == second and first.startswith(said.format(tmp_path))


@pytest.mark.parametrize(("event", "step", "said"), [
    ("loss", 3, "loss is nan, gradient norm is nan"),
    ("gradient norm", 3, "gradient norm is inf"),
    ("validation loss", 4, "validation loss is inf"),
])  # fmt: skip
def test_a_number_that_is_not_finite_on_one_rank_stops_all(ranks, tmp_path, event, step, said):
    (first, _), (second, _) = ranks.run(rank_run, tmp_path, event)
    assert first == second and first.startswith(f"step {step}: {said}, so the run stops")
    saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert saved == ["step-00000002"]

    last = records(tmp_path)[-1]
    assert last["step"] == step and (last["loss"] is None) == (event.endswith("loss"))


@on_ranks(2)
def test_a_run_that_has_made_its_steps_says_so(group, tmp_path):
    """Also where a later start asks for fewer; nothing is trained, and nothing fails."""

    def started(steps: int) -> tuple[str, str]:
        forget_earlier_runs()
        screen, bar = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(bar):
            config = replace(RUN, out_dir=tmp_path, steps=steps)
            assert run(config, corpus(), torch.device("cpu")) == 0
        return screen.getvalue(), bar.getvalue()

    started(2)
    before = records(tmp_path)
    for steps in (2, 1):
        screen, bar = started(steps)
        assert records(tmp_path) == before
        if group.rank() == 0:
            done = f"\nthe run has made 2 steps, and steps is {steps}: nothing is left to train\n"
            assert done in screen and "2/2 [" in bar


# Of runs with ``head.filter_eps`` and ``data.by_frequency``.
SPREAD = 32  # of the VOCAB tokens that occur one lies in every 32 ids
TILES = VOCAB * SPREAD // 256
NARROW = replace(CONFIG.model, init_std=0.02)
FILTERED = replace(RUN, compare=True, model=NARROW, head=HeadConfig(filter_eps=2.0**-9))


def spread_corpus(shift: int = 0) -> Corpus:
    few = corpus()
    train, validation = (ids * SPREAD + shift for ids in (few.train, few.validation))
    return replace(few, train=train, validation=validation, vocab_size=VOCAB * SPREAD)


def rank_of_run(group: Any, config: RunConfig, shift: int = 0) -> int | str:
    forget_earlier_runs()
    try:
        corpus = spread_corpus(shift).by_frequency(VOCAB * SPREAD)
        return run(config, corpus, torch.device("cpu"))
    except RunError as error:
        return str(error)


def trained_run(ranks: RankPool, out_dir: Path, **changes: Any) -> list[dict[str, Any]]:
    config = replace(FILTERED, out_dir=out_dir, **changes)
    assert ranks.run(rank_of_run, config) == [0, 0]
    return records(out_dir)


def test_a_run_records_what_is_approximated_resumes_and_compares(ranks, tmp_path):
    whole = trained_run(ranks, tmp_path / "whole", compare=False)
    losses = [entry for entry in whole if entry["kind"] == "train"]
    assert losses[-1]["loss"] < losses[0]["loss"]
    # All tokens that occur are in one tile, which their labels keep.
    assert losses[0]["kept_share"] == pytest.approx(1 / TILES)
    assert losses[0]["rank_one_mass"] == pytest.approx(1 - 1 / TILES, abs=0.05)
    assert losses[-1]["rank_one_mass"] < losses[0]["rank_one_mass"]
    assert all("kept_share" not in entry for entry in whole if entry["kind"] == "validation")

    trained_run(ranks, tmp_path / "resumed", steps=4, compare=False)
    assert trained_run(ranks, tmp_path / "resumed") == whole
    # The differences of the filtered head are its approximation; exact gradients have none.
    heads = json.loads((tmp_path / "resumed" / "compare.json").read_text())["records"]
    filtered, exact, megatron = heads
    assert filtered["head"] == "ours: Filter(eps=0.001953125)"
    assert exact["head"].startswith("ours: recompute, ") and megatron["head"] == "Megatron"
    for head in heads:
        assert head["loss"] == pytest.approx(megatron["loss"], rel=1e-6)
        assert head["peak_mib"] > 0
    assert exact["dweight_relative_rms"] < 1e-5
    assert 1e-5 < filtered["dweight_relative_rms"] < 0.1
    longer = replace(FILTERED, out_dir=tmp_path / "resumed", steps=8)
    (message, _) = ranks.run(rank_of_run, longer, 1)
    assert message.startswith("cannot continue ") and "ids.sha256 is '" in message
