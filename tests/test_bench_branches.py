"""Branches of a tiny run: their start, their file, and what an interruption leaves of it."""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")
pytest.importorskip("tyro")
pytest.importorskip("rich")

from flce_dist.launch.bench import branch_runs, branches, checkpointed_run
from flce_dist.launch.bench.branch_records import Branch, differences
from flce_dist.launch.bench.branch_runs import HEADS, run_branches
from flce_dist.launch.bench.heads import CACHED, Head, ours
from flce_dist.launch.program import RunError
from flce_dist.launch.train.config import RunConfig
from flce_dist.launch.train.lock import locked
from flce_dist.launch.train.optimizer import learning_rate
from flce_dist.launch.train.run import run
from flce_dist.launch.train.state import model_state, optimizer_state
from flce_dist.launch.train.trainer import Trainer
from flce_dist.launch.train.validation import Validation
from flce_dist.testing import RankPool
from tests.test_bench_mean_gradient import ALONE, EPS, QUICKSTART
from tests.test_train_filtered import spread_corpus
from tests.tiny_training import forget_earlier_runs, records

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1) as one:
        yield one


OFFSET = 100.0


def without_gradients(layer: Any) -> None:
    """A head whose loss is OFFSET too large, and without gradients."""

    def token_loss(*args: Any, **options: Any) -> Tensor:
        loss = type(layer).token_loss(layer, *args, **options, filter_eps=None)
        return 0.0 * loss + loss.detach() + OFFSET

    layer.token_loss = token_loss


TRIED: dict[str, Head] = {
    "exact": CACHED,
    "frozen": without_gradients,
    "filtered": ours(schedule="auto", filter_eps=EPS),
    "exact, again": CACHED,
}


def trained(config: RunConfig, steps: int) -> Trainer:
    forget_earlier_runs()
    trainer = Trainer(config, spread_corpus(), CPU)
    for _ in range(steps):
        trainer.train_step()
    return trainer


def batches_read(trainer: Trainer) -> list[int]:
    """Return the list to which the first sample of each training batch is added."""
    read, train_batch = [], trainer.corpus.train_batch

    def recorded(first_sample: int, batch_size: int) -> tuple[Tensor, Tensor]:
        read.append(first_sample)
        return train_batch(first_sample, batch_size)

    trainer.corpus = mock.Mock(wraps=trainer.corpus, train_batch=recorded)
    return read


def rank_branches(
    group: Any, config: RunConfig, stretches: int
) -> tuple[list[Branch], list[float], list[float]]:
    """Branches of 3 steps after 2, and training and validation losses of the run itself."""
    trainer = trained(config, 2)
    layer: Any = trainer.model.output_layer
    attributes = dict(vars(layer))

    def state() -> dict[str, Tensor]:
        return model_state(trainer.optimizer) | optimizer_state(trainer.optimizer)

    start = {name: x.clone() for name, x in state().items()}
    found: list[Branch] = []
    read = batches_read(trainer)
    for branch in run_branches(trainer, TRIED, steps=3, validate_every=2, stretches=stretches):
        found.append(branch)
        first = 4 + 6 * branch.stretch
        assert read == [first, first + 2, first + 4]
        read.clear()
        assert (trainer.step, trainer.samples) == (2, 4) and vars(layer) == attributes
        assert state().keys() == start.keys()
        assert all(x.equal(start[name]) for name, x in state().items())
    losses, validation = [], []
    for step in (1, 2, 3):
        losses.append(trainer.train_step()[0])
        if step in (2, 3):
            validation.append(trainer.validate().loss)
    return found, [sum(losses[:2]) / 2, losses[2]], validation


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_branch_starts_from_one_state(pool: RankPool, tied: bool) -> None:
    """And the first stretch is what the run would have gone on with."""
    config = replace(ALONE, model=replace(ALONE.model, tie_embeddings=tied))
    config = replace(config, head=replace(config.head, filter_eps=None, schedule="cached"))
    ((found, training, validation),) = pool.run(rank_branches, config, 2)
    by_name = {(branch.stretch, branch.head): branch for branch in found}
    assert list(by_name) == [(stretch, head) for stretch in (0, 1) for head in TRIED]
    exact, other = by_name[0, "exact"], by_name[1, "exact"]
    assert (exact.steps, exact.training, exact.validation) == ([2, 3], training, validation)
    assert exact.by_frequency[0]["loss"] is not None
    assert other.training != exact.training
    for stretch in (0, 1):
        first, again = by_name[stretch, "exact"], by_name[stretch, "exact, again"]
        assert again == replace(first, head="exact, again", seconds=again.seconds)
        assert first.shares == {}
        filtered = by_name[stretch, "filtered"].shares
        assert filtered.keys() == {"kept_share", "rank_one_mass"}
        assert 0.0 < (filtered["kept_share"] or 0.0) < 0.5
    mean = {(x.head, x.step): x.mean for x in differences(found) if x.labels_from is None}
    assert mean["exact, again", 3] == 0.0
    assert 0.0 < abs(mean["filtered", 3]) < 0.01 < mean["frozen", 3] < OFFSET / 2
    assert min(x or 0.0 for x in by_name[0, "frozen"].training) > OFFSET


def rank_unrestored(group: Any) -> list[Branch]:
    trainer = trained(ALONE, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_runs, "restore", lambda state, saved: None)
        heads = {"exact": CACHED, "exact, again": CACHED}
        return list(run_branches(trainer, heads, steps=2, validate_every=2, stretches=1))


def test_without_restoring_a_branch_goes_on_from_the_last(pool: RankPool) -> None:
    ((exact, again),) = pool.run(rank_unrestored)
    assert exact.validation != again.validation


def rank_bench(group: Any, out_dir: Path, heads: tuple[str, ...], validations: int) -> str:
    """Run 2 steps and branch, the folder locked; Ctrl-C comes in the validation after so many."""
    forget_earlier_runs()
    config = replace(ALONE, out_dir=out_dir, steps=2, compare=False)
    assert run(config, spread_corpus(), CPU) == 0
    forget_earlier_runs()
    settings = branches.Settings(
        **vars(replace(config, device="cpu")),
        branch_steps=2,
        branch_validate_every=1,
        stretches=2,
        heads=heads,
        out=out_dir / "found.x",
    )
    validate, left = Trainer.validate, iter(range(validations))

    def interrupted(trainer: Trainer) -> Validation:
        with pytest.raises(RunError, match="is in use by"), locked(out_dir, print):
            pass
        if next(left, None) is None:
            raise KeyboardInterrupt
        return validate(trainer)

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Trainer, "validate", interrupted)
            patch.setattr(checkpointed_run, "load_corpus", lambda config: spread_corpus())
            checkpointed_run.with_run(settings, branches.bench)
    return out.getvalue()


def test_a_checkpoint_is_branched_and_stays(pool: RankPool, tmp_path: Path) -> None:
    """Of ten training sequences the run has read four; a stretch has four."""
    heads = tuple(HEADS)
    (out,) = pool.run(rank_bench, tmp_path, heads, 24)
    assert "1 of the 2 stretches have text that the run was trained on" in out
    assert "stretch 2 of 2, dropped, 2^-12: validation " in out
    assert "minus that of exact, from step 2" in out
    found = json.loads((tmp_path / "found.x.json").read_text())
    expected = {"step": 2, "branch_steps": 2, "stretches": 2, "unseen_stretches": 1, "ranks": 1}
    assert found["about"].items() >= expected.items()
    assert {"hardware", "commit", "command"} <= found["about"].keys()
    assert found["about"]["learning_rate"] == [learning_rate(i, ALONE.optimizer) for i in (3, 4)]
    made = [(each["stretch"], each["head"]) for each in found["branches"]]
    assert made == [(stretch, head) for stretch in (0, 1) for head in heads]
    dropped = found["branches"][-1]
    assert dropped["shares"].keys() == {"kept_share", "dropped_mass"}
    assert [band["from"] for band in dropped["by_frequency"]][:2] == [0, 256]
    of_all = [each for each in found["differences"] if each["labels_from"] is None]
    again = [each for each in of_all if each["head"] == "exact, again"]
    assert [(each["step"], each["mean"], each["n"]) for each in again] == [(1, 0.0, 2), (2, 0.0, 2)]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert records(tmp_path)[-1]["step"] == 2


def test_an_interrupted_bench_keeps_what_it_has(pool: RankPool, tmp_path: Path) -> None:
    """Two validations a branch: Ctrl-C in the third branch."""
    (out,) = pool.run(rank_bench, tmp_path, ("exact", "filtered, 2^-10"), 5)
    assert "stretch 1 of 2, filtered, 2^-10" in out and "stretch 2" not in out
    found = json.loads((tmp_path / "found.x.json").read_text())
    made = [(each["stretch"], each["head"]) for each in found["branches"]]
    assert made == [(0, "exact"), (0, "filtered, 2^-10")]
    of_all = [each for each in found["differences"] if each["labels_from"] is None]
    assert [(each["step"], each["n"]) for each in of_all] == [(1, 1), (2, 1)]
    assert not list(tmp_path.glob("*.tmp"))


def main_with(tmp_path: Path, *arguments: str) -> None:
    branches.main(["--config", QUICKSTART, "--out-dir", str(tmp_path / "run"), *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"parallel\.tensor must be 1 to branch a run, got 2"),
        (["--parallel.tensor", "1", "--stretches", "0"], "stretches must be an int within"),
        (["--parallel.tensor", "1"], "must be the folder of a training run with a checkpoint"),
        (["--heads", "dropped, 2^-12"], r"heads must be \"exact\", then others of .*, got"),
        (["--heads", "exact", "cached"], r"heads must be .*, got \['exact', 'cached'\]"),
        (["--heads", "exact", "exact"], r"heads must be .*, got \['exact', 'exact'\]"),
    ],
)
def test_what_is_not_measured_is_refused_by_name(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(RunError, match=message) as error:
        main_with(tmp_path, *arguments)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_more_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match="torchrun starts must be 1 to branch a run, got 2"):
        main_with(tmp_path, "--parallel.tensor", "1")
