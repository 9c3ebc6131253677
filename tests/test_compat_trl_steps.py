"""A step of TRL's trainers as it is, with flce_dist.compat.trl, and of a model with the plug-in."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flce_dist.compat import trl as compat
from flce_dist.hf import use_linear_cross_entropy
from flce_dist.testing import relative_rms
from tests.doc_scripts import ROOT, printed, scripts_of
from tests.test_compat_trl import apply, utils

__all__ = ["utils"]  # a fixture


WORDS = [chr(97 + i) for i in range(26)]


def tiny(folder: Path) -> tuple[Any, Any]:
    """A causal language model of 2 layers and its tokenizer, which knows letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocab = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokens = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, padding_side="left", **special)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
        initializer_range=0.3,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)  # from where GRPO loads its reference
    return Qwen2ForCausalLM.from_pretrained(folder), tokenizer


COMMON: dict[str, Any] = dict(
    optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_steps=1, logging_steps=1,
    report_to="none", save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False,
    per_device_train_batch_size=4, disable_tqdm=True, seed=3, max_grad_norm=0.0,
)  # fmt: skip


def sft_step(folder: Path, **changes: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"prompt": " ".join(WORDS[i : i + 3]), "completion": " a b " * (i + 1)} for i in range(4)
    ]
    model, tokenizer = tiny(folder / "model")
    return SFTTrainer(
        model, SFTConfig(str(folder), max_length=32, **COMMON, **changes),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip


def grpo_step(folder: Path) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def vowels(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(text.count(x) for x in "aeiou")) for text in completions]

    model, tokenizer = tiny(folder / "model")
    config = GRPOConfig(
        str(folder),
        num_generations=4,
        max_completion_length=8,
        temperature=0.7,
        beta=0.04,
        **COMMON,
    )
    prompts = Dataset.from_list([{"prompt": " ".join(WORDS[i : i + 4])} for i in range(4)])
    return GRPOTrainer(
        model, vowels, args=config, train_dataset=prompts, processing_class=tokenizer
    )


def outcome(
    make: Callable[[Path], Any], folder: Path
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """How one step changes each parameter, and what the trainer logs of it."""
    torch.manual_seed(5)
    trainer = make(folder)
    before = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
    trainer.train()
    changes = {name: x.detach() - before[name] for name, x in trainer.model.named_parameters()}
    timed = ("runtime", "per_second", "time", "mfu", "flops")
    logs = {k: v for k, v in trainer.state.log_history[0].items() if not any(x in k for x in timed)}
    return changes, logs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"logits": True}], ids=str)
@pytest.mark.parametrize("given", [{}, {"label_smoothing_factor": 0.1}], ids=str)
def test_a_model_with_the_plug_in_of_transformers(utils, options, given, tmp_path, monkeypatch):
    """TRL's head does not call its loss, and is right; what needs logits has no labels."""
    make = partial(sft_step, **given)
    changes, logs = outcome(make, tmp_path / "theirs")

    def plugged(folder: Path) -> Any:
        made, tokenizer = theirs(folder)
        return use_linear_cross_entropy(made, **options), tokenizer

    theirs = tiny
    monkeypatch.setattr(sys.modules[__name__], "tiny", plugged)
    found, ours = outcome(make, tmp_path / "ours")
    for name, change in changes.items():
        assert relative_rms(found[name], change) <= 1e-6, name
    assert ours == logs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [sft_step, grpo_step])
def test_a_step_is_trls_own(utils, make, tmp_path, monkeypatch):
    changes, logs = outcome(make, tmp_path / "theirs")
    compat.use_linear_cross_entropy()
    counted = mock.Mock(side_effect=apply)
    monkeypatch.setattr(compat.ChunkedLogProbFunction, "apply", counted)
    found, ours = outcome(make, tmp_path / "ours")
    assert counted.called and found.keys() == changes.keys()
    assert all(x.abs().max() > 0 for x in changes.values() if x.dim() > 1)
    for name, change in changes.items():
        assert relative_rms(found[name], change) <= 1e-4, name
    assert ours.keys() == logs.keys()
    for name, value in logs.items():
        assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def sharded_rank(group: dist.ProcessGroup, folder: Path, sharded: bool) -> list[Tensor]:
    """Gradients of each parameter for the tokens of this rank, or of FSDP2 for those of all."""
    from transformers import Qwen2ForCausalLM
    from trl.trainer import utils

    model = Qwen2ForCausalLM.from_pretrained(folder)
    utils.add_fused_lm_head(model)
    if sharded:
        compat.use_linear_cross_entropy()
        fully_shard(model.lm_head)
        fully_shard(model)
    g = torch.Generator().manual_seed(group.rank())
    ids = torch.randint(3, 29, (2, 12), generator=g)
    loss = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
    loss.backward()
    gradients: list[Any] = [x.grad for x in model.parameters()]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in gradients]


@pytest.mark.filterwarnings("ignore")
def test_fsdp_averages_the_gradient_of_the_head_too(utils, pools, tmp_path):
    """TRL's own head sums it, so that the gradient's norm is too large."""
    tiny(tmp_path)
    plain = pools[2].run(sharded_rank, tmp_path, False)
    expected = [(x + y) / 2 for x, y in zip(*plain, strict=True)]
    for found in pools[2].run(sharded_rank, tmp_path, True):
        assert all(relative_rms(x, y) < 1e-4 for x, y in zip(found, expected, strict=True))


def test_the_script_of_the_page(utils, tmp_path):
    script = scripts_of(ROOT / "docs" / "rl_libraries.md")[0]
    losses = re.findall(r"^(\d+\.\d+)$", printed(script, tmp_path), re.M)
    assert len(losses) == 1 and 1 < float(losses[0]) < 3
