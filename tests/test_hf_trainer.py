"""The plug-in under transformers' Trainer: its own run, step by step, and its evaluation."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
import transformers

from flce_dist.hf import NO_LOGITS, restore, use_linear_cross_entropy
from tests.contract.compare import compare
from tests.hf_models import VOCAB, S, ours, real_logits, step, theirs
from tests.on_ranks import on_ranks
from tests.test_hf_on_ranks import RELEASE, loaded

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
    with contextlib.ExitStack() as stack:
        is_noted = "torch_compile" not in changes  # the compiler traces no patched function
        made = stack.enter_context(real_logits()) if is_noted else []
        found = trained(plugged, tmp_path, **changes)
    assert len(made) == (6 if "label_smoothing_factor" in changes else 0)
    compare(found, trained(model, tmp_path, **changes), 1e-5)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate(mixed_precision):
    """Its casts to fp32 of what a model returns, and its gathering of metrics."""
    reset_accelerate()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision)
    plugged = ours(theirs("gemma2, softcap"))
    optimizer = torch.optim.SGD(plugged.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(plugged, optimizer)
    rows_of = torch.stack([row["input_ids"] for row in rows(0)[:2]])
    with real_logits() as made:
        out = prepared(input_ids=rows_of, labels=rows_of)
        accelerator.backward(out.loss)
        optimizer.step()
    assert made == [] and out.logits is NO_LOGITS
    assert accelerator.gather_for_metrics(out.loss.detach()).isfinite()
    asked = prepared(input_ids=rows_of, labels=rows_of, logits=True).logits
    assert asked.dtype == torch.float32 and asked.requires_grad
    reset_accelerate()


def test_accelerate_takes_its_casts_away_again():
    reset_accelerate()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    expected = step(ours(theirs(), label_smoothing=0.1))
    plugged = ours(theirs(), label_smoothing=0.3)
    prepared = accelerator.prepare(plugged)
    use_linear_cross_entropy(prepared, label_smoothing=0.1)
    with real_logits() as made:
        step(prepared)
        alone = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert alone is plugged
        compare(step(alone), expected, 1e-5)
    assert made == []
    compare(step(restore(alone)), step(theirs()), 1e-5)
    reset_accelerate()


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


def test_evaluation_of_rows_without_labels(tmp_path):
    """Batches of no label are left out of the mean, or make it NaN in older releases."""
    model = theirs()
    dataset = [dict(row) for row in rows(1)]
    dataset[1]["labels"] = torch.full_like(torch.as_tensor(dataset[1]["labels"]), -100)
    losses = [
        trainer(one, tmp_path, per_device_eval_batch_size=1, prediction_loss_only=True).evaluate(
            dataset
        )["eval_loss"]
        for one in (ours(model), model)
    ]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0.0, equal_nan=True)


def reset_accelerate() -> None:
    """Let accelerate forget its processes, which tests of one process share."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


WITH_FSDP2 = pytest.mark.skipif(
    RELEASE < (5, 19), reason="Trainer wraps it in DDP before transformers 5.19"
)


@pytest.mark.parametrize("how", ["DDP", pytest.param("FSDP2", marks=WITH_FSDP2)])
@on_ranks(2)
def test_ranks(group, how, tmp_path):
    """A run on ranks computes no logits, and ends with their own weights; DDP as it is by default.

    FSDP2 is transformers' own: accelerate shards nothing on a CPU.
    """
    ranks = {
        "RANK": str(group.rank()), "LOCAL_RANK": str(group.rank()), "WORLD_SIZE": "2",
        "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    }  # fmt: skip
    changes: dict[str, Any] = {"optim": "sgd", "gradient_accumulation_steps": 1}
    shards = {"fsdp_size": 2} if how == "FSDP2" else None
    with mock.patch.dict(os.environ, ranks):
        models = [
            theirs() if shards is None else loaded("llama", tmp_path / name, group, **shards)
            for name in ("ours", "theirs")
        ]
        plugged, model = use_linear_cross_entropy(models[0]), models[1]
        assert isinstance(plugged, FSDPModule) == (how == "FSDP2")
        reset_accelerate()
        with real_logits() as made:
            found = trained(plugged, tmp_path, **changes)
        assert made == []
        with real_logits() as made:
            trainer(plugged, tmp_path, **changes).evaluate()
        assert len(made) == 1
        reset_accelerate()
        expected = trained(model, tmp_path, **changes)
        reset_accelerate()
    found, expected = ({name: whole(x) for name, x in run.items()} for run in (found, expected))
    compare(found, expected, 1e-5)


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x
