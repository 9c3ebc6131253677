"""Validation loss by the frequency of labels, on simulated ranks of every layout and head."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")  # before ranks are forked
pytest.importorskip("tyro")

from flce_dist.launch.train import trainer as trainer_module
from flce_dist.launch.train.config import HeadConfig, ParallelConfig, RunConfig
from flce_dist.launch.train.data import Corpus
from flce_dist.launch.train.trainer import Trainer
from flce_dist.launch.train.validation import BANDS, Validation, band_of_token, band_sums
from flce_dist.testing import RankPool
from tests.tiny_training import CONFIG, forget_earlier_runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

ENTRIES = 20_000
SEQUENCE = CONFIG.model.seq_length


@functools.cache
def skewed_corpus() -> Corpus:
    """Frequent tokens have large ids; most labels are frequent, and one band has none."""
    g = torch.Generator().manual_seed(0)
    places = (ENTRIES * torch.rand(6000, SEQUENCE + 1, generator=g) ** 4).long()
    tokens = ENTRIES - 1 - places
    train, validation = tokens[:-8], tokens[-8:]
    sorted_tokens = torch.bincount(train.flatten(), minlength=ENTRIES).sort(
        descending=True, stable=True
    )[1]
    validation[torch.isin(validation, sorted_tokens[BANDS[2] : BANDS[3]])] = ENTRIES - 1
    return Corpus(train, validation, ENTRIES, seed=1)


def by_definition(losses: Tensor, labels: Tensor, counts: Tensor) -> list[dict[str, Any]]:
    """Sort the vocabulary, and take the mean over the labels of each part of it."""
    tokens = sorted(range(len(counts)), key=lambda token: -int(counts[token]))
    found = []
    for first, end in zip(BANDS, [*BANDS[1:], len(tokens)], strict=True):
        here = torch.isin(labels, torch.tensor(tokens[first:end]))
        mean = float(losses[here].double().mean()) if here.any() else None
        found.append({"from": first, "tokens": int(here.sum()), "loss": mean})
    return found


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], rel: float) -> None:
    def numbers(bands: list[dict[str, Any]]) -> list[float]:
        return [math.nan if x is None else x for band in bands for x in band.values()]

    assert numbers(found) == pytest.approx(numbers(expected), rel=rel, nan_ok=True)


def rank_validate(group: Any, config: RunConfig, mistake: str = "") -> Validation:
    forget_earlier_runs()
    trainer = Trainer(config, skewed_corpus(), torch.device("cpu"))
    with torch.compiler.set_stance("force_eager"), pytest.MonkeyPatch.context() as patch:
        if mistake == "a rank's share alone":
            sum_up = torch.distributed.all_reduce
            patch.setattr(
                torch.distributed,
                "all_reduce",
                lambda x, *op, **group: (
                    None if x.dtype == torch.float64 else sum_up(x, *op, **group)
                ),
            )
        elif mistake == "bands of other labels":
            sums_of = trainer_module.band_sums
            patch.setattr(
                trainer_module, "band_sums", lambda losses, bands: sums_of(losses, bands.flip(1))
            )
        return trainer.validate()


def rank_losses(group: Any) -> list[dict[str, Any]]:
    """The validation loss by definition, of Megatron's real logits."""
    forget_earlier_runs()
    corpus = skewed_corpus()
    trainer = Trainer(layout(1, 1, kind="megatron_unfused"), corpus, torch.device("cpu"))
    tokens, labels = corpus.validation_batch(0, 8)
    with torch.no_grad():
        losses = trainer_module.token_losses(trainer.model, tokens, labels)
    return by_definition(losses, labels, corpus.token_counts())


def layout(tensor: int, data: int, context: int = 1, **head: Any) -> RunConfig:
    """All eight sequences, as two batches for each replica."""
    return replace(
        CONFIG,
        data=replace(CONFIG.data, batch_size=4 // data, validation_batches=2),
        head=HeadConfig(**head),
        parallel=ParallelConfig(tensor=tensor, context=context),
    )


@pytest.fixture(scope="module")
def expected(pools: dict[int, RankPool]) -> list[dict[str, Any]]:
    (found,) = pools[1].run(rank_losses)
    return found


def test_bands_are_cut_where_they_should_be() -> None:
    counts = torch.arange(ENTRIES).flip(0)  # token 0 is the most frequent
    bands = band_of_token(counts)
    assert bands.bincount().tolist() == [256, 768, 3072, 12288, ENTRIES - 16384]
    assert bands[[0, 255, 256, 1023, 1024, 16383, 16384]].tolist() == [0, 0, 1, 1, 2, 3, 4]
    assert torch.equal(band_of_token(counts.flip(0)), bands.flip(0))
    assert band_of_token(torch.zeros(300)).tolist() == [0] * 256 + [1] * 44, "equal counts: by id"


def test_a_band_with_a_loss_that_is_not_finite_leaves_others_alone() -> None:
    losses = torch.tensor([[1.0, torch.inf], [2.0, 5.0]])
    found = Validation.of(band_sums(losses, torch.tensor([[0, 1], [0, 4]])))
    assert [band["loss"] for band in found.by_frequency] == [1.5, torch.inf, None, None, 5.0]
    assert found.loss == torch.inf


@pytest.mark.parametrize(
    ("tensor", "data", "context"),
    [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)],
)
def test_every_layout_counts_each_label_once(
    pools: dict[int, RankPool],
    expected: list[dict[str, Any]],
    tensor: int,
    data: int,
    context: int,
) -> None:
    config = layout(tensor, data, context)
    assert expected[2] == {"from": 1024, "tokens": 0, "loss": None}
    assert sum(band["tokens"] for band in expected) == 8 * SEQUENCE
    ranks = pools[tensor * data * context].run(rank_validate, config)
    for validation in ranks:
        assert validation == ranks[0]
        assert_same(validation.by_frequency, expected, rel=1e-4)


@pytest.mark.parametrize(
    "head",
    [
        {"schedule": "in_forward"},
        {"filter_eps": 2.0**-12, "vocab_order": True},
        {"kind": "megatron_unfused"},
        {"kind": "megatron_fused"},
    ],
    ids=str,
)
def test_every_head_has_the_loss_of_each_token(
    pools: dict[int, RankPool], expected: list[dict[str, Any]], head: dict[str, Any]
) -> None:
    for validation in pools[2].run(rank_validate, layout(2, 1, **head)):
        assert_same(validation.by_frequency, expected, rel=1e-4)


@pytest.mark.parametrize("mistake", ["a rank's share alone", "bands of other labels"])
def test_mistakes_are_noticed(
    pools: dict[int, RankPool], expected: list[dict[str, Any]], mistake: str
) -> None:
    first, *_ = pools[2].run(rank_validate, layout(1, 2), mistake)
    with pytest.raises(AssertionError):
        assert_same(first.by_frequency, expected, rel=1e-4)
