"""Errors of mean gradients: synthetic ones, those of a tiny model, and of a run's checkpoint."""

import contextlib
import functools
import io
import itertools
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

from rich.console import Console

from flce_dist.launch.bench import mean_gradient
from flce_dist.launch.bench.checkpointed_run import at_checkpoint
from flce_dist.launch.bench.head_errors import EXACT, HEADS, Group, MeanRecord, Moments, measure
from flce_dist.launch.bench.heads import Head, ours
from flce_dist.launch.dropped_tiles import drop_tiles
from flce_dist.launch.program import RunError
from flce_dist.launch.train.config import HeadConfig, ParallelConfig, RunConfig
from flce_dist.launch.train.run import run
from flce_dist.launch.train.trainer import Trainer
from flce_dist.testing import RankPool
from tests.test_train_filtered import FILTERED, spread_corpus
from tests.tiny_training import forget_earlier_runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

QUICKSTART = str(Path(__file__).parent.parent / "configs" / "quickstart.yaml")
EPS, BATCHES = 2.0**-9, 8
D, N = 2000, 32
ALONE = replace(FILTERED, parallel=ParallelConfig(tensor=1))


def moments_of(bias: Tensor, spread: float, seed: int) -> Moments:
    """Of N vectors [D] of independent noise about ``bias``; |noise|^2 is about ``spread**2``."""
    g, moments = torch.Generator().manual_seed(seed), Moments()
    for _ in range(N):
        moments.add(bias + spread * D**-0.5 * torch.randn(D, generator=g))
    return moments


def synthetic(bias: float, seed: int = 1) -> MeanRecord:
    """A head of independent errors about as large as the exact gradient, and a constant one."""
    direction = torch.ones(D) / D**0.5
    exact, error = moments_of(direction, 0.5, 0), moments_of(bias * direction, 1.0, seed)
    return MeanRecord.of("synthetic", Group(None, None, lambda: direction), exact, error)


def check_estimates() -> None:
    unbiased = synthetic(0.0)
    assert unbiased.batch_error == pytest.approx(1 / 1.25**0.5, rel=0.05)
    assert unbiased.noise == pytest.approx(N**-0.5, rel=0.05)
    assert unbiased.mean_error is not None and unbiased.mean_error < 0.3 * N**-0.5
    biased = synthetic(0.2)
    assert biased.noise == pytest.approx(N**-0.5, rel=0.05)
    assert biased.mean_error == pytest.approx(0.2, rel=0.15)


def test_a_bias_is_told_from_independent_errors() -> None:
    check_estimates()


def test_without_the_correction_noise_counts_as_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moments, "mean_square", property(lambda self: _plain_square(self)))
    with pytest.raises(AssertionError):
        check_estimates()


def _plain_square(moments: Moments) -> float:
    return float((moments.sum / moments.batches).square().sum())


def test_an_estimate_below_0_is_0_and_shown() -> None:
    found = [synthetic(0.0, seed) for seed in range(1, 9)]
    squares = [x.mean_error_square or 0.0 for x in found]
    assert min(squares) < 0 < max(squares) and abs(sum(squares)) / 8 < 0.002
    for record, square in zip(found, squares, strict=True):
        out = printed([record])
        assert ("0.00000*" in out) == (record.mean_error == 0.0) == (square < 0)


def test_a_mean_that_is_not_told_from_0_is_no_measure() -> None:
    exact = next(x for x in (moments_of(torch.zeros(D), 1.0, i) for i in range(9)) if
                 x.mean_square < 0)  # fmt: skip
    found = MeanRecord.of("synthetic", Group(None, None, lambda: torch.zeros(D)), exact, exact)
    assert (found.exact_mean, found.batch_error) == (0.0, 1.0)
    assert found.mean_error is found.mean_error_square is found.noise is None
    assert printed([found]).count(" - ") == 2


def printed(records: list[MeanRecord]) -> str:
    facts = {"step": 1, "batches": N, "tokens_per_batch": 16}
    out = io.StringIO()
    Console(file=out, width=140).print(mean_gradient.table(records, facts))
    return out.getvalue()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1) as one:
        yield one


def rank_measure(group: Any, config: RunConfig) -> tuple[list[MeanRecord], float, float]:
    """Records after two steps; the mean squared norm of what is measured, and of EXACT's groups."""
    forget_earlier_runs()
    trainer = Trainer(config, spread_corpus(), torch.device("cpu"))
    for _ in range(2):
        trainer.train_step()
    model: Any = trainer.model
    before = dict(vars(model.output_layer))
    heads: dict[str, Head] = {
        "again": EXACT,
        "filtered": ours(schedule="auto", filter_eps=EPS),
        "dropped": functools.partial(drop_tiles, eps=EPS),
    }
    (*earlier, (last, records)) = measure(trainer, BATCHES, heads)
    assert [*(n for n, _ in earlier), last] == list(range(2, BATCHES + 1))
    assert vars(model.output_layer) == before

    if config.head.filter_eps is not None:
        return records, 0.0, 0.0
    total = 0.0
    for i in range(BATCHES):
        trainer.distributed.zero_grad_buffer()
        trainer._loss(*trainer.corpus.train_batch(4 + 2 * i, 2)).backward()
        for name, x in model.named_parameters():
            if config.model.tie_embeddings or "embedding" not in name:
                total += float(x.main_grad.square().sum()) / BATCHES
    exact = [record.exact_rms**2 for record in records if record.head == "again"]
    return records, total, sum(exact)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "head",
    [{}, {"kind": "dropped_tiles", "filter_eps": 0.0}, {"filter_eps": EPS}],
    ids=["exact", "dropped", "filtered"],
)
def test_heads_are_compared_on_a_model(pool: RankPool, tied: bool, head: dict[str, Any]) -> None:
    config = replace(
        ALONE,
        model=replace(ALONE.model, tie_embeddings=tied),
        head=HeadConfig(**head, vocab_order=True),
    )
    ((records, total, exact),) = pool.run(rank_measure, config)
    assert exact == pytest.approx(total, rel=1e-3)
    groups = ["layers", "rows 0 to 255", "rows 256 to 1,023", "rows 1,024 to 2,047"]
    assert list(dict.fromkeys(record.group for record in records)) == groups
    found = {(record.head, record.group): record for record in records}
    for group in groups:
        again = found["again", group]
        assert (again.batch_error, again.mean_error, again.noise) == (0.0, 0.0, 0.0)
    filtered, dropped = found["filtered", "layers"], found["dropped", "layers"]
    for name in ("batch_error", "mean_error"):
        assert 0.0 < 5 * getattr(filtered, name) < getattr(dropped, name), name
    for group in groups[2:]:  # no token that occurs, so no tile that is kept
        rows = found["dropped", group]
        assert (rows.batch_error, rows.mean_error) == (1.0, 1.0)
        assert rows.exact_rms > 0


def test_without_an_order_rows_are_those_of_the_tokens(pool: RankPool) -> None:
    config = replace(ALONE, head=HeadConfig(), model=replace(ALONE.model, tie_embeddings=False))
    ((records, total, exact),) = pool.run(rank_measure, config)
    assert exact == pytest.approx(total, rel=1e-3)
    rms = {record.first: record.exact_rms for record in records}
    assert rms[0] > 10 * max(rms[256], rms[1024]), "all labels are among the most frequent tokens"


def rank_bench(group: Any, out_dir: Path, batches: int) -> str:
    forget_earlier_runs()
    config = replace(ALONE, out_dir=out_dir, steps=2, compare=False)
    assert run(config, spread_corpus(), torch.device("cpu")) == 0
    forget_earlier_runs()
    settings = mean_gradient.Settings(**vars(config), batches=batches, out=out_dir / "found.x")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        trainer = at_checkpoint(settings, spread_corpus(), torch.device("cpu"))
        mean_gradient.bench(settings, trainer)
    return out.getvalue()


def test_a_checkpoint_is_measured(pool: RankPool, tmp_path: Path) -> None:
    """Of ten training sequences the run has read four; a batch has two."""
    (out,) = pool.run(rank_bench, tmp_path, 4)
    assert "1 of the 4 batches are text that the run was trained on" in out
    assert "batch 4 of 4, " in out and "step 2: 4 batches of 16 tokens" in out
    found = json.loads((tmp_path / "found.x.json").read_text())
    expected = {"step": 2, "batches": 4, "unseen_batches": 3, "tokens_per_batch": 16, "ranks": 1}
    assert found["about"].items() >= expected.items()
    assert found["about"]["config"]["head.filter_eps"] == EPS
    assert {"hardware", "commit", "torch", "command"} <= found["about"].keys()
    assert [record["head"] for record in found["records"]] == [*HEADS] * 4


def rank_bench_cut_short(group: Any, out_dir: Path) -> None:
    def cut_short(*args: Any) -> Any:
        yield from itertools.islice(measure(*args), 2)
        raise KeyboardInterrupt

    patched = mock.patch.object(mean_gradient, "measure", cut_short)
    with patched, contextlib.suppress(KeyboardInterrupt):
        rank_bench(group, out_dir, 4)


def test_an_interrupted_benchmark_leaves_what_it_has(pool: RankPool, tmp_path: Path) -> None:
    pool.run(rank_bench_cut_short, tmp_path)
    found = json.loads((tmp_path / "found.x.json").read_text())
    assert (found["about"]["batches"], found["about"]["unseen_batches"]) == (3, 3)
    assert [record["head"] for record in found["records"]] == [*HEADS] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"parallel\.tensor must be 1 to measure mean gradients, got 2"),
        (["--parallel.tensor", "1", "--parallel.context", "2"], r"parallel\.context must be 1"),
        (["--parallel.tensor", "1", "--batches", "1"], "batches must be an int within"),
        (
            ["--parallel.tensor", "1", "--head.label-smoothing", "0.1"],
            r"head\.label_smoothing must be 0\.0 to measure mean gradients, got 0\.1",
        ),
        (
            "--parallel.tensor 1 --head.kind megatron_fused --head.max-logits-bytes None".split(),
            r"head\.kind must be linear_cross_entropy or dropped_tiles .*, got megatron_fused",
        ),
        (["--parallel.tensor", "1"], "must be the folder of a training run with a checkpoint, got"),
    ],
)
def test_what_is_not_measured_is_refused_by_name(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RunError, match=message) as error:
        mean_gradient.main(["--config", QUICKSTART, "--out-dir", str(folder), *arguments])
    assert "\n" not in str(error.value) and not folder.exists()
    if "checkpoint" in message:
        assert str(folder) in str(error.value)


def test_more_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = "number of ranks that torchrun starts must be 1 to measure mean gradients, got 2"
    with pytest.raises(RunError, match=message):
        mean_gradient.main(["--parallel.tensor", "1", "--out-dir", str(tmp_path)])
