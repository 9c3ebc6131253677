"""The plug-in under transformers' Trainer: its own run, step by step, and its evaluation."""

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from tests.contract.compare import compare
from tests.hf_models import VOCAB, S, ours, real_logits, theirs

ROWS = 12


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """TrainingArguments tells accelerate by the environment what to compile."""
    with mock.patch.dict(os.environ):
        yield


def rows(seed: int) -> list[dict[str, Any]]:
    """Rows whose numbers of labels differ, so that a mean of means is not the mean."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (ROWS, S), generator=generator)
    labels = [row.masked_fill(torch.arange(S) < i % 7, -100) for i, row in enumerate(ids)]
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]


def trainer(model: Any, folder: Any, **changes: Any) -> Any:
    metrics = changes.pop("compute_metrics", None)
    arguments: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "max_steps": 3, "learning_rate": 0.01, "disable_tqdm": True,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **changes,
    }  # fmt: skip
    data: Any = {"train_dataset": rows(0), "eval_dataset": rows(1), "compute_metrics": metrics}
    given = transformers.TrainingArguments(**arguments)
    return transformers.Trainer(model=model, args=given, **data)


def trained(model: Any, folder: Any, **changes: Any) -> dict[str, Any]:
    run = trainer(model, folder, **changes)
    run.train()
    losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert len(losses) == 3
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": torch.tensor(losses), **weights}


@pytest.mark.parametrize(("kind", "changes"), [
    ("llama", {}),
    ("gemma2, softcap", {"gradient_checkpointing": True}),
    ("qwen3-moe, auxiliary loss", {"gradient_accumulation_steps": 3}),
    ("gpt2, tied", {"label_smoothing_factor": 0.1}),  # which takes real logits
    ("granite, quotient", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
])  # fmt: skip
def test_a_run_equals_their_own(kind, changes, tmp_path):
    """After SGD, whose steps are as long as the gradient."""
    changes = {"optim": "sgd", **changes}
    model = theirs(kind)
    plugged = ours(model)
    compare(trained(plugged, tmp_path, **changes), trained(model, tmp_path, **changes), 1e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_mixed_precision_computes_no_logits(bf16, tmp_path):
    plugged = ours(theirs("gemma2, softcap"))
    with real_logits() as made:
        trained(plugged, tmp_path, bf16=bf16)
        assert made == []
        trainer(plugged, tmp_path, bf16=bf16).evaluate()  # in eval() the output has logits
        assert len(made) == 2
        without = ours(theirs("gemma2, softcap"), logits=False)
        trainer(without, tmp_path, bf16=bf16).evaluate()
        assert len(made) == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_evaluation(compiled, tmp_path):
    given = {"torch_compile": compiled, "torch_compile_backend": "aot_eager" if compiled else None}
    model = theirs("cohere, product")
    plugged = ours(model)

    def accuracy(found: Any) -> dict[str, float]:
        predictions, labels = found
        return {"right": float((predictions[:, :-1].argmax(-1) == labels[:, 1:]).mean())}

    results: list[dict[str, Any]] = []
    for one in (plugged, model):
        run = trainer(one, tmp_path, compute_metrics=accuracy, **given)
        result = run.predict(rows(1))
        alone = trainer(one, tmp_path, **given).evaluate()["eval_loss"]
        results.append({"logits": torch.tensor(result.predictions), "alone": torch.tensor(alone)})
        results[-1]["loss"] = torch.tensor(result.metrics["test_loss"])
        results[-1]["right"] = result.metrics["test_right"]
    compare(results[0], results[1], 1e-5)
    run = trainer(plugged, tmp_path, **given)
    without = [{"input_ids": row["input_ids"]} for row in rows(1)]
    assert run.predict(without).predictions.shape == (ROWS, S, VOCAB)
