"""The head that leaves tiles out, against fp64 and in training runs of each other head."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")  # before ranks are forked
pytest.importorskip("tyro")

from flce_dist.launch import dropped_tiles
from flce_dist.launch.dropped_tiles import dropped_tiles_loss
from flce_dist.launch.train.config import HeadConfig, ParallelConfig, RunConfig
from flce_dist.launch.train.data import Corpus
from flce_dist.launch.train.run import run
from flce_dist.launch.train.trainer import Trainer
from flce_dist.testing import RankPool, relative_rms
from flce_dist.testing.filtered_gradients import TILE_T
from tests.filtered_formula import definition, exact, zipf_inputs
from tests.problems import Inputs, Outcome, Upstream, per_token_upstream
from tests.test_train_filtered import FILTERED, spread_corpus
from tests.tiny_training import forget_earlier_runs, records

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

EPS = 2.0**-9
T, V = 600, 5000  # neither fills its tiles


@pytest.fixture(autouse=True)
def chunks_of_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped_tiles, "CHUNK", 256)


def outcome(inputs: Inputs, upstream: Tensor, eps: float) -> tuple[Outcome, float, float]:
    """Loss and gradients, the share of tiles kept and the mass dropped."""
    hidden, weight = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
    loss, kept_share, mass = dropped_tiles_loss(hidden, weight, inputs.labels, eps)
    assert not (kept_share.requires_grad or mass.requires_grad)
    loss.backward(upstream)
    assert hidden.grad is not None and weight.grad is not None
    found = {"loss": loss.detach(), "dhidden": hidden.grad, "dweight": weight.grad}
    return found, float(kept_share), float(mass)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return zipf_inputs(T, V, ignored=0.0)


UPSTREAM = per_token_upstream(T)


def test_with_all_tiles_kept_it_is_exact(inputs: Inputs) -> None:
    found, kept_share, mass = outcome(inputs, UPSTREAM, 0.0)
    expected = exact(inputs, torch.float64, Upstream(UPSTREAM.double()), reduction="none")
    assert (kept_share, mass) == (1.0, 0.0)
    for name in found:
        assert relative_rms(found[name], expected[name]) < 2e-6, name


def test_dropped_tiles_have_no_gradient_and_others_the_exact_one(inputs: Inputs) -> None:
    found, kept_share, mass = outcome(inputs, UPSTREAM, EPS)
    options: dict[str, Any] = {"reduction": "none"}
    upstream = Upstream(UPSTREAM.double())
    expected = definition(inputs, EPS, upstream, drops=True, **options)
    rank_one = definition(inputs, EPS, upstream, **options)
    exact_ones = exact(inputs, torch.float64, upstream, **options)
    assert 0.1 < kept_share < 0.9
    assert kept_share == pytest.approx(float(expected.kept.float().mean()))
    assert mass == pytest.approx(float(expected.rank_one_mass), rel=1e-4)
    assert relative_rms(found["loss"], exact_ones["loss"]) < 1e-6
    for name in ("dhidden", "dweight"):
        assert relative_rms(found[name], getattr(expected, name)) < 2e-6, name
        # These gradients are told from the exact ones, and from those with a rank-one term.
        assert relative_rms(found[name], getattr(rank_one, name)) > 1e-4, name
        assert relative_rms(found[name], exact_ones[name]) > 1e-4, name


def test_half_precision_rounds_once(inputs: Inputs) -> None:
    rounded = inputs.to(torch.bfloat16)
    found, _, _ = outcome(rounded, UPSTREAM, EPS)
    upstream = Upstream(UPSTREAM.double())
    expected = definition(rounded, EPS, upstream, drops=True, reduction="none")
    for name in ("dhidden", "dweight"):
        assert found[name].dtype == torch.bfloat16
        assert relative_rms(found[name], getattr(expected, name)) < 4e-3, name


def test_dweight_is_added_to_main_grad(inputs: Inputs) -> None:
    expected, _, _ = outcome(inputs, UPSTREAM, EPS)
    hidden, weight = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
    parameter: Any = weight
    parameter.main_grad = torch.ones_like(weight)
    parameter.grad_added_to_main_grad = False
    loss, *_ = dropped_tiles_loss(hidden, weight, inputs.labels, EPS, accumulates=True)
    loss.backward(UPSTREAM)
    assert parameter.grad_added_to_main_grad and weight.grad is not None
    assert not weight.grad.any()
    assert torch.equal(parameter.main_grad, 1.0 + expected["dweight"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """GEMMs of half precision have fp32 results there."""
    inputs = zipf_inputs(1000, 20_000, 512, dtype, ignored=0.0).to(torch.device("cuda"))
    upstream = per_token_upstream(1000).cuda()
    found, kept_share, mass = outcome(inputs, upstream, EPS)
    truth: dict[str, Any] = {"upstream": Upstream(upstream.double()), "reduction": "none"}
    expected = definition(inputs, EPS, drops=True, **truth)
    assert kept_share == pytest.approx(float(expected.kept.double().mean()))
    assert mass == pytest.approx(float(expected.rank_one_mass), rel=1e-4)
    loss = exact(inputs, torch.float64, **truth)["loss"]
    assert relative_rms(found["loss"], loss) < 1e-5
    budget = 1e-5 if dtype == torch.float32 else 4e-3
    for name in ("dhidden", "dweight"):
        assert relative_rms(found[name], getattr(expected, name)) < budget, name


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1) as one:
        yield one


def rank_kept(group: Any, config: RunConfig) -> float:
    """The share of tiles kept for two sequences, each with labels in one of eight tiles."""
    forget_earlier_runs()
    tokens = torch.arange(2)[:, None] * 256 + torch.arange(TILE_T + 1) % 256
    corpus = Corpus(tokens, tokens, 2048, seed=1)
    trainer = Trainer(config, corpus, torch.device("cpu"))
    trainer.train_step()
    return trainer.filtered["kept_share"]


@pytest.mark.parametrize("kind", ["linear_cross_entropy", "dropped_tiles"])
def test_blocks_are_of_one_sequence(pool: RankPool, kind: Any) -> None:
    config = replace(
        FILTERED,
        model=replace(FILTERED.model, seq_length=TILE_T),
        data=replace(FILTERED.data, batch_size=2),
        head=HeadConfig(kind=kind, filter_eps=EPS),
        parallel=ParallelConfig(tensor=1),
    )
    assert pool.run(rank_kept, config) == [1 / 8]


def rank_run(group: Any, config: RunConfig) -> int:
    forget_earlier_runs()
    with torch.compiler.set_stance("force_eager"):
        return run(config, spread_corpus(), torch.device("cpu"))


def train(
    pool: RankPool, out_dir: Path, head: dict[str, Any], **changes: Any
) -> list[dict[str, Any]]:
    config = replace(
        FILTERED,
        out_dir=out_dir,
        head=HeadConfig(**head),
        parallel=ParallelConfig(tensor=1),
        **changes,
    )
    assert pool.run(rank_run, config) == [0]
    return [{k: v for k, v in x.items() if k != "head_peak_mib"} for x in records(out_dir)]


def losses(entries: list[dict[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in entries]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_with_all_tiles_kept_a_run_is_the_exact_one(
    pool: RankPool, tmp_path: Path, tied: bool
) -> None:
    model = replace(FILTERED.model, tie_embeddings=tied)
    head = {"kind": "dropped_tiles", "filter_eps": 0.0}
    found = train(pool, tmp_path / "dropped", head, model=model)
    exact_run = train(pool, tmp_path / "exact", {}, model=model, compare=False)
    assert losses(found) == pytest.approx(losses(exact_run), rel=1e-5)
    assert not (tmp_path / "dropped" / "compare.json").exists(), "it is another head"


@pytest.mark.parametrize(
    ("head", "shares"),
    [
        ({"schedule": "cached", "vocab_order": True}, set()),
        ({"filter_eps": EPS, "vocab_order": True}, {"kept_share", "rank_one_mass"}),
        (
            {"kind": "dropped_tiles", "filter_eps": EPS, "vocab_order": True},
            {"kept_share", "dropped_mass"},
        ),
        ({"kind": "megatron_unfused"}, set()),
    ],
    ids=["exact", "filtered", "dropped", "megatron"],
)
def test_every_kind_of_a_comparison_runs_and_resumes(
    pool: RankPool, tmp_path: Path, head: dict[str, Any], shares: set[str]
) -> None:
    whole = train(pool, tmp_path / "whole", head, compare=False, export_head=8)
    steps = [entry for entry in whole if entry["kind"] == "train"]
    assert len(steps) == 6 and steps[-1]["loss"] < steps[0]["loss"]
    named = {"kept_share", "rank_one_mass", "dropped_mass"}
    assert all(entry.keys() & named == shares for entry in steps)
    if shares:
        assert 0.0 < steps[0]["kept_share"] < 0.5
    for entry in whole:
        if entry["kind"] == "validation":
            bands = [band for band in entry["by_frequency"] if band["tokens"]]
            assert sum(band["tokens"] for band in bands) == 16
            total = sum(band["tokens"] * band["loss"] for band in bands)
            assert total / 16 == pytest.approx(entry["loss"])
    assert torch.load(tmp_path / "whole" / "head.pt")["hidden"].shape[0] == 8
    train(pool, tmp_path / "resumed", head, steps=4, compare=False)
    assert train(pool, tmp_path / "resumed", head, compare=False) == whole
