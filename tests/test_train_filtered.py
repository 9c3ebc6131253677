"""Training runs with ``head.filter_eps`` and ``head.vocab_order``, on two simulated ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")  # before ranks are forked
pytest.importorskip("tyro")

from flce_dist.launch.program import RunError
from flce_dist.launch.train.config import HeadConfig, RunConfig
from flce_dist.launch.train.data import Corpus
from flce_dist.launch.train.run import run
from flce_dist.testing import RankPool
from tests.tiny_training import CONFIG, VOCAB, corpus, forget_earlier_runs, records

SPREAD = 32  # of the VOCAB tokens that occur one lies in every 32 ids
TILES = VOCAB * SPREAD // 256
FILTERED = replace(
    CONFIG,
    steps=6,
    validate_every=2,
    checkpoint_every=2,
    model=replace(CONFIG.model, init_std=0.02),
    head=HeadConfig(filter_eps=2.0**-9, vocab_order=True),
)


def spread_corpus(shift: int = 0) -> Corpus:
    few = corpus()
    return replace(
        few,
        train=few.train * SPREAD + shift,
        validation=few.validation * SPREAD + shift,
        vocab_size=VOCAB * SPREAD,
    )


def rank_run(group: Any, config: RunConfig, shift: int = 0) -> int | str:
    forget_earlier_runs()
    try:
        return run(config, spread_corpus(shift), torch.device("cpu"))
    except RunError as error:
        return str(error)


def train(ranks: RankPool, out_dir: Path, **changes: Any) -> list[dict[str, Any]]:
    config = replace(FILTERED, out_dir=out_dir, **changes)
    assert ranks.run(rank_run, config) == [0, 0]
    return records(out_dir)


def test_a_run_records_what_is_approximated_resumes_and_compares(ranks, tmp_path):
    whole = train(ranks, tmp_path / "whole", compare=False)
    losses = [entry for entry in whole if entry["kind"] == "train"]
    assert losses[-1]["loss"] < losses[0]["loss"]
    # All tokens that occur are in one tile, which their labels keep.
    assert losses[0]["kept_share"] == pytest.approx(1 / TILES)
    assert losses[0]["rank_one_mass"] == pytest.approx(1 - 1 / TILES, abs=0.05)
    assert losses[-1]["rank_one_mass"] < losses[0]["rank_one_mass"]
    assert all("kept_share" not in entry for entry in whole if entry["kind"] == "validation")

    train(ranks, tmp_path / "resumed", steps=4, compare=False)
    assert train(ranks, tmp_path / "resumed") == whole
    # The differences of the filtered head are its approximation; exact gradients have none.
    heads = json.loads((tmp_path / "resumed" / "compare.json").read_text())["heads"]
    filtered, exact, _ = heads
    assert filtered == "ours: filtered:0.001953125" and exact.startswith("ours: recompute, ")
    for head in heads.values():
        assert head["loss"] == pytest.approx(heads["Megatron"]["loss"], rel=1e-6)
        assert head["peak_mib"] > 0
    assert heads[exact]["dweight_relative_rms"] < 1e-5
    assert 1e-5 < heads[filtered]["dweight_relative_rms"] < 0.1
    (message, _) = ranks.run(rank_run, replace(FILTERED, out_dir=tmp_path / "resumed", steps=8), 1)
    assert message.startswith("cannot continue ") and "head.vocab_order is '" in message
