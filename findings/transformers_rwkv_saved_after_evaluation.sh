#!/usr/bin/env bash
# transformers 5.24.0: RWKV's first forward in evaluation mode divides weights of its blocks from
# the 7th on (rescale_every=6, the default) in place, by 2, then by 4 and so on; the next one in
# training multiplies them again. What is saved in between has the divided weights, and is divided
# again where it is loaded. So Trainer's checkpoints depend on whether it evaluates before it saves,
# and those after an evaluation compute something else than what was evaluated. No error, no
# warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 \
    accelerate==1.15.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

logging.disable_progress_bar()
shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 14, "intermediate_size": 64}
MODELS = (
    (LlamaForCausalLM, LlamaConfig(**shape, num_attention_heads=4)),
    (RwkvForCausalLM, RwkvConfig(**shape, context_length=64)),
)
torch.manual_seed(0)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (8, 16))]


def fresh(model_class, config):
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.6)  # a fresh model hardly depends on its blocks
    return model


def trained(model_class, config, evaluates):
    """Return the model in the checkpoint of one step of Trainer, and the loss that it evaluated."""
    folder = Path(sys.argv[1], f"{model_class.__name__}-{evaluates}")
    arguments = TrainingArguments(
        folder, max_steps=1, per_device_train_batch_size=8, save_steps=1, eval_steps=1,
        eval_strategy="steps" if evaluates else "no", use_cpu=True, report_to="none",
        disable_tqdm=True,
    )
    model = fresh(model_class, config)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return model_class.from_pretrained(folder / "checkpoint-1").eval(), losses


is_as_described = True
for model_class, config in MODELS:
    without, _ = trained(model_class, config, evaluates=False)
    after, (evaluated,) = trained(model_class, config, evaluates=True)
    pairs = zip(without.state_dict().items(), after.state_dict().values(), strict=True)
    ratios = sorted({(a.norm() / b.norm()).round(decimals=3).item() for (_, a), b in pairs})
    ids = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():
        losses = [model(ids, labels=ids).loss.item() for model in (without, after)]
    print(f"{model_class.__name__}: loss that Trainer evaluated {evaluated:.4f}")
    print(f"    of the checkpoint without an evaluation before it: {losses[0]:.4f}")
    print(f"    of the checkpoint after the evaluation:            {losses[1]:.4f}")
    print(f"    weights of the first are those of the second times {ratios}")
    is_as_described &= abs(losses[0] - evaluated) < 1e-3
    if model_class is RwkvForCausalLM:
        is_as_described &= abs(losses[1] - evaluated) > 0.05 and ratios == [1, 2, 4]
    else:
        is_as_described &= abs(losses[1] - evaluated) < 1e-3 and ratios == [1]
sys.exit(0 if is_as_described else "RWKV no longer saves the weights of its evaluation mode")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder"
