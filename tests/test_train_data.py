"""The order of training data, and the text it comes from."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from flce_dist.launch.program import RunError
from flce_dist.launch.train import __main__ as program
from flce_dist.launch.train import data as data_module
from flce_dist.launch.train import ranks
from flce_dist.launch.train.config import DataConfig, RunConfig, flatten, resume_conflicts
from flce_dist.launch.train.data import IGNORED, Corpus, open_corpus, tokenise
from flce_dist.testing import RankPool
from tests.tiny_training import CONFIG, corpus, load_once


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "load_tokenizer", load_once)


def test_a_batch_depends_on_the_position_alone_and_passes_have_orders_of_their_own():
    data = corpus()
    passes = [data.train_batch(first, 10)[0] for first in (0, 10)]
    for order in passes:
        rows = sorted(map(tuple, order.tolist()))
        assert rows == sorted(map(tuple, data.train[:, :-1].tolist()))
    assert not torch.equal(*passes)
    tokens, labels = corpus().train_batch(7, 6)  # across the end of a pass
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert torch.equal(tokens, torch.cat(passes)[7:13])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_ignored_labels_are_tokens_of_the_input(batch_size):
    data = replace(corpus(), prompt_tokens=5)
    for batch in (Corpus.train_batch, Corpus.validation_batch):
        tokens, labels = batch(data, 0, batch_size)
        expected, all_labels = batch(corpus(), 0, batch_size)
        assert torch.equal(tokens, expected)
        assert (labels[:, :5] == IGNORED).all()
        assert torch.equal(labels[:, 5:], all_labels[:, 5:])


def test_the_real_text_has_a_real_vocabulary_and_a_validation_split():
    pytest.importorskip("mistral_common")
    data = open_corpus(RunConfig(), tokenise(RunConfig()))
    assert data.vocab_size == 131_072
    assert len(data.train) > 300 and 10 < len(data.validation) < 40
    ids = torch.cat([data.train, data.validation])
    assert ids.shape[1] == 257 and 0 <= ids.min() and ids.max() < data.vocab_size
    assert ids.unique().numel() > 3000


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5])
def test_no_sequence_of_validation_is_trained_on(fraction):
    """They are the last ones; but for the rest of a sequence every token is in one of both."""
    ids = np.arange(9 * 40 + 5, dtype=np.int32)
    config = replace(CONFIG, data=DataConfig(validation_fraction=fraction))
    train, validation = data_module.cut(ids, config)
    assert torch.equal(torch.cat([train, validation]).flatten(), torch.arange(9 * 40).int())
    assert len(validation) == max(1, int(fraction * len(ids)) // 9)


def test_tokens_are_renumbered_by_how_often_the_training_text_has_them():
    """On all ranks alike; labels follow, and a checkpoint knows the numbers."""
    pytest.importorskip("mistral_common")
    given = RunConfig(data=DataConfig(by_frequency=True, prompt_tokens=3))
    plain, data = (open_corpus(config, tokenise(config)) for config in (RunConfig(), given))
    (ids, _), (new_ids, labels) = (each.train_batch(0, 4) for each in (plain, data))
    assert data.new_ids is not None and not torch.equal(ids, new_ids)
    assert torch.equal(data.new_ids[ids], new_ids)
    assert (labels[:, :3] == IGNORED).all() and torch.equal(labels[:, 3:-1], new_ids[:, 4:])
    counts = data.new_ids[data.train.flatten()].bincount(minlength=data.vocab_size)
    tiles = counts.view(-1, 256).sum(1)
    assert tiles.max() > 0.4 * tiles.sum()
    assert torch.equal(data.new_ids.sort()[0], torch.arange(131_072))
    assert data.sources.keys() - plain.sources.keys() == {"ids.sha256"}


def test_a_text_is_known_by_its_digest_wherever_it_lies(tmp_path):
    pytest.importorskip("mistral_common")

    def identity(name: str, content: bytes) -> dict[str, Any]:
        (tmp_path / name).write_bytes(content)
        config = replace(CONFIG, data=replace(CONFIG.data, text=tmp_path / name))
        return flatten(config) | tokenise(config).sources

    text = b"In the beginning was the text. " * 20
    here, moved, other = identity("a", text), identity("b", text), identity("a", text + b"!")
    assert resume_conflicts(here, moved) == []
    (conflict,) = resume_conflicts(moved, other)
    key = "data.text.sha256"
    assert conflict == (
        f"{key} is '{here[key]}' (of {tmp_path}/b) there and '{other[key]}' (of {tmp_path}/a) here"
    )


def other_ids(path: Path) -> None:
    np.save(path, np.full_like(np.load(path), 77))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "other ids": other_ids,
    "no digest": lambda path: path.with_suffix(".json").unlink(),
    "nested digest": lambda path: path.with_suffix(".json").write_text("[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_tokens_that_are_not_those_of_the_text_are_made_anew(tmp_path, damage, capsys):
    pytest.importorskip("mistral_common")
    (tmp_path / "text").write_text("words, words, words " * 20)
    config = replace(CONFIG, data=replace(CONFIG.data, text=tmp_path / "text"))
    config = replace(config, out_dir=tmp_path / "run")
    path, *_ = tokens = tokenise(config)
    ids = np.load(path)
    assert tokenise(config) == tokens and capsys.readouterr().err == ""
    DAMAGES[damage](path)
    assert tokenise(config) == tokens and np.array_equal(np.load(path), ids)
    said = f"{path} is not what {path.stem}.json says; making it anew\n"
    assert capsys.readouterr().err == said
    assert tokenise(config) == tokens and capsys.readouterr().err == ""


def test_tokens_that_cannot_be_made_or_seen_are_an_error(tmp_path):
    pytest.importorskip("mistral_common")
    (tmp_path / "text").write_text("words, words, words " * 20)
    config = replace(CONFIG, data=replace(CONFIG.data, text=tmp_path / "text"))
    config = replace(config, out_dir=tmp_path / "run")
    path, *_ = tokens = tokenise(config)
    fifo(path)
    with pytest.raises(RunError, match=f"^cannot write {path}: Not a regular file$"):
        tokenise(config)
    path.unlink()
    with pytest.raises(RunError, match=f"^{path} must lie where all ranks see it, but one cannot"):
        open_corpus(config, tokens)


def rank_main(group: Any, text: Path, *options: str) -> str:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    options = (*options, "--parallel.tensor", "1", "--device", "cpu", "--data.text", str(text))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in alone.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["train", *options, "--out-dir", str(text.parent / "runs/one")])
        patch.setattr(ranks, "join_ranks", lambda device: None)
        with pytest.raises(RunError) as error:
            program.main()
    return str(error.value)


def test_a_text_that_will_not_do_leaves_nothing_behind(tmp_path):
    pytest.importorskip("mistral_common")
    text = tmp_path / "text"
    with RankPool(1) as rank:
        text.write_bytes(b"\x7fELF\xff\xfe")
        (said,) = rank.run(rank_main, text)
        assert said == f"{text}:1: must be UTF-8, got byte 0xff"
        text.write_text("a few words only")
        (said,) = rank.run(rank_main, text)
        must = "seq_length and data.validation_fraction must leave one training"
        assert must in said and said.endswith("got 256 and 0.05")
        assert list(tmp_path.iterdir()) == [text]

        text.write_text("words, words, words " * 20)
        config = replace(CONFIG, data=replace(CONFIG.data, text=text))
        path, *_ = tokenise(replace(config, out_dir=tmp_path / "runs" / "other"))
        (said,) = rank.run(rank_main, text, "--model.seq-length", "1000")
        assert said.endswith("got 1000 and 0.05")  # of a text whose tokens are there
        assert list((tmp_path / "runs").iterdir()) == [path.parent]
