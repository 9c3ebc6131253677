"""docs/megatron.md: its first script, on one rank and two, and each block behind it, on one."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from flce_dist import megatron
from flce_dist.megatron import use_linear_cross_entropy
from tests.contract.models import Setting, batch, gpt
from tests.doc_scripts import printed
from tests.docstring_examples import run_example
from tests.on_ranks import on_ranks
from tests.processes import ROOT

PUBLIC = [getattr(megatron, name) for name in megatron.__all__]
PAGE = (ROOT / "docs" / "megatron.md").read_text()
ALONE = Setting(1, False)
SCRIPT, *BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


def block(word: str, **names: Any) -> dict[str, Any]:
    """Run the one block that contains ``word``; return its variables."""
    (source,) = (x for x in BLOCKS if word in x)
    exec(compile(source, f"docs/megatron.md, {word}", "exec"), names)
    return names


def given(at: Setting = ALONE, **options: Any) -> dict[str, Any]:
    """A model in ``eval()`` with the plug-in, and a batch in which some labels do not count."""
    model = use_linear_cross_entropy(gpt(at), **options).eval()
    tokens, positions, labels = batch()
    labels[0, :3] = -100
    return {
        "model": model,
        "tokens": tokens,
        "positions": positions,
        "mask": None,
        "labels": labels,
    }


def test_every_block_is_run() -> None:
    words = (
        "model_cfg", "return use", "last_metrics", "skip_ignored", "scores", "best_ids",
        "LogitsSaverHooks", "theirs",
    )  # fmt: skip
    assert [sum(word in x for x in BLOCKS) for word in words] == [1] * len(BLOCKS)


def test_the_first_script_trains_the_same_on_one_rank_and_two(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    alone, split = (printed(SCRIPT, tmp_path, *start) for start in ((), launcher))
    losses = [[float(line.split()[1]) for line in text.splitlines()] for text in (alone, split)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert len(losses[0]) == 10 and losses[0][9] < 0.7 * losses[0][0]


@on_ranks(1)
def test_the_line_of_a_provider(group: Any) -> None:
    hooks: list[Any] = []
    block("model_cfg", model_cfg=SimpleNamespace(pre_wrap_hooks=hooks))
    (source,) = (x for x in BLOCKS if "return use" in x)
    body = ast.parse(f"def provide(model):\n{re.sub('(?m)^', '    ', source)}")
    names: dict[str, Any] = {}
    exec(compile(body, "docs/megatron.md, return", "exec"), names)
    for plug in (*hooks, names["provide"]):
        model = gpt(Setting(1, False))
        assert plug(model) is model
        assert type(model.output_layer).__module__.startswith("flce_dist.")


@on_ranks(1)
def test_metrics(group: Any) -> None:
    found = block("last_metrics", **given())
    assert 0 <= found["accuracy"] <= 1 and found["entropy"] > 0 and found["z_loss"] > 0


@on_ranks(1)
def test_tokens_that_do_not_count(group: Any) -> None:
    names = given() | {"model": gpt(Setting(1, False))}  # the block plugs it
    mask = (names["labels"] != -100).float()
    losses = block("skip_ignored", **names, loss_mask=mask)["losses"]
    assert torch.equal(losses != 0, mask.bool())


@on_ranks(1)
def test_scores_and_best_ids(group: Any) -> None:
    names = given()
    ids = names["labels"][..., None].clamp_min(0)
    found = block("scores", **names, ids=ids)["found"]
    assert found.logprob.shape == ids.shape and found.entropy.shape == ids.shape[:-1]
    best = block("best_ids", **names)
    assert best["found"].ids.shape == (*ids.shape[:-1], 5) and 0 <= best["accuracy"] <= 1


def test_the_saver_takes_the_place_of_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    distillation = pytest.importorskip("megatron.training.distillation", exc_type=ImportError)
    monkeypatch.setattr(distillation, "LogitsSaverHooks", distillation.LogitsSaverHooks)
    saver = block("LogitsSaverHooks")["LogitsSaverHooks"]
    assert saver.__module__.startswith("flce_dist.")
    assert distillation.LogitsSaverHooks is saver


@pytest.mark.parametrize("P", [1, 2])
@on_ranks("P")
def test_the_comparison_with_megatrons_path(group: Any, P: int) -> None:
    at = Setting(P, P > 1)
    names = given(at)
    labels = names["labels"].clamp_(min=0)
    found = block("theirs", **names)
    assert (found["loss"] - found["theirs"]).abs().max() < 1e-5
    assert len(found["errors"]) > 5 and max(found["errors"]) < 1e-5
    plain = gpt(at).eval()
    loss = plain(names["tokens"], names["positions"], None, labels=labels)
    expected = torch.autograd.grad(loss.sum(), plain.parameters())
    for x, y in zip(found["others"], expected, strict=True):
        torch.testing.assert_close(x, y)
    names |= {"model": given(at, label_smoothing=0.1)["model"]}  # which Megatron's loss lacks
    assert max(block("theirs", **names)["errors"]) > 0.01


@on_ranks(1)
def test_a_divergence_as_the_page_on_distillation_computes_it(group: Any) -> None:
    page = (ROOT / "docs" / "distillation.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (source,) = (x for x in blocks if "flce_dist.megatron" in x)
    names = given() | {"model": gpt(Setting(1, False)), "teacher": gpt(Setting(1, False))}
    with torch.no_grad():
        names["teacher"].output_layer.weight.mul_(0.5)
    exec(compile(source, "docs/distillation.md, megatron", "exec"), names)
    assert torch.equal(names["losses"] > 0, names["labels"] != -100)


@on_ranks(1)
def test_examples_of_docstrings(group: Any) -> None:
    names = given()
    of_call = {
        **{function.__name__: function for function in PUBLIC},
        "torch": torch,
        "model": names["model"],
        "teacher": given()["model"],
        "ids": names["tokens"],
        "chosen": names["tokens"],
        "positions": names["positions"],
        "labels": names["labels"],
        "GPTModel": lambda *arguments: gpt(Setting(1, False)),
        **dict.fromkeys(("config", "layer_spec", "vocab_size", "max_length")),
    }
    shape = names["tokens"].shape
    assert run_example(use_linear_cross_entropy, **of_call)["loss"].shape == shape
    assert run_example(megatron.scores, **of_call)["logprob"].shape == shape
    assert run_example(megatron.best_ids, **of_call)["correct"].shape == shape
    assert run_example(megatron.divergence, **of_call)["loss"].isfinite()
