#!/usr/bin/env bash
# transformers 5.24.0: Trainer with label_smoothing_factor trains a mixture of experts without the
# loss that balances its experts, though output_router_logits asks for it: the factor
# router_aux_loss_coef no longer changes anything. No error, no warning. (Trainer takes the labels
# away to compute the loss itself; Mixtral and Qwen3-MoE add the router's loss only to their own.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 \
    accelerate==1.15.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PrinterCallback,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

shape = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 1,
    "output_router_logits": True,
}
mixtral = {**shape, "num_local_experts": 4}
qwen = {**shape, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 64, (8, 6))]


def first_step(model_class, config, smoothing):
    """Return the loss and the gradient's norm."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        sys.argv[1], max_steps=1, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, log_level="error", logging_steps=1, per_device_train_batch_size=8,
        label_smoothing_factor=smoothing,
    )
    trainer = Trainer(model_class(config), arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    log = trainer.state.log_history[0]
    return log["loss"], log["grad_norm"]


is_as_described = True
families = [
    (MixtralForCausalLM, MixtralConfig, mixtral),
    (Qwen3MoeForCausalLM, Qwen3MoeConfig, qwen),
]
for model_class, config_class, options in families:
    print(model_class.__name__)
    for smoothing in (0.0, 0.1):
        found = []
        for factor in (0.0, 1.0):
            config = config_class(**options, router_aux_loss_coef=factor)
            found.append(first_step(model_class, config, smoothing))
            print(f"    label smoothing {smoothing}, factor of the router's loss {factor}:", end="")
            print(" loss %.4f, norm of the gradient %.4f" % found[-1])
        (loss_without, norm_without), (loss_with, norm_with) = found
        if smoothing:
            is_as_described &= (loss_with, norm_with) == (loss_without, norm_without)
        else:  # balanced experts give 1
            is_as_described &= loss_with - loss_without > 0.9 and norm_with != norm_without
sys.exit(0 if is_as_described else "label smoothing no longer drops the router's loss")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder/out"
