#!/usr/bin/env bash
# transformers 5.24.0: Trainer with gradient_accumulation_steps=N gives BERT's masked language
# model, T5, and a regression by Llama N times the loss and N times the gradient of the same rows in
# one batch. It takes a forward with **kwargs for one that divides by num_items_in_batch; these
# accept the argument and return a mean. No error, no warning; Llama's language model is right.
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
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PrinterCallback,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

shape = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "pad_token_id": 0,
}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
bert = BertConfig(**shape, **no_dropout)
llama = LlamaConfig(**shape)
regression = LlamaConfig(**shape, num_labels=1)
t5 = T5Config(
    vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
    decoder_start_token_id=0,
)

torch.manual_seed(0)
ids = torch.randint(1, 64, (8, 6))  # eight rows of equally many labels
texts = [{"input_ids": row, "labels": row} for row in ids]
numbers = [{"input_ids": row, "labels": row.float().mean()} for row in ids]


def first_step(model_class, config, rows, steps):
    """Return the loss and the gradient's norm of eight rows, taken in ``steps`` parts."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        sys.argv[1], max_steps=1, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, log_level="error", logging_steps=1, max_grad_norm=1e9,
        per_device_train_batch_size=8 // steps, gradient_accumulation_steps=steps,
    )
    trainer = Trainer(model_class(config), arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    log = trainer.state.log_history[0]
    return log["loss"], log["grad_norm"]


cases = [
    (LlamaForCausalLM, llama, texts, 1),
    (BertForMaskedLM, bert, texts, 4),
    (T5ForConditionalGeneration, t5, texts, 4),
    (LlamaForSequenceClassification, regression, numbers, 4),
]
is_as_described = True
for model_class, config, rows, factor in cases:
    whole = first_step(model_class, config, rows, steps=1)
    parts = first_step(model_class, config, rows, steps=4)
    print(model_class.__name__)
    print("    8 rows at once:   loss %.4f, norm of the gradient %.4f" % whole)
    print("    4 times 2 rows:   loss %.4f, norm of the gradient %.4f" % parts)
    for once, accumulated in zip(whole, parts, strict=True):
        is_as_described &= abs(accumulated / once - factor) < 0.01
sys.exit(0 if is_as_described else "accumulation no longer multiplies these gradients")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder/out"
