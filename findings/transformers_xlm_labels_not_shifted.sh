#!/usr/bin/env bash
# transformers 5.24.0: the documentation of XLMWithLMHeadModel and FlaubertWithLMHeadModel says that
# "the labels are shifted inside the model, i.e. you can set labels = input_ids", as GPT-2's does.
# They are not: the loss compares each position with the token that it reads itself, and a causal
# model (causal=True) trained so repeats its input instead of predicting the next token. No error,
# no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F
from transformers import (
    FlaubertConfig,
    FlaubertWithLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    XLMConfig,
    XLMWithLMHeadModel,
)

VOCAB_SIZE = 61
gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
xlm = {"vocab_size": VOCAB_SIZE, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True}
MODELS = (
    (GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB_SIZE, **gpt2), True),
    (XLMWithLMHeadModel, XLMConfig(**xlm, pad_token_id=0), False),
    (FlaubertWithLMHeadModel, FlaubertConfig(**xlm, pad_token_id=0), False),
)


def texts(rows):
    """Return rows in which each token follows from the one before it."""
    ids = [torch.randint(1, VOCAB_SIZE, (rows,))]
    for _ in range(11):
        ids.append(ids[-1] * 2 % VOCAB_SIZE)
    return torch.stack(ids, 1)


def exact_loss(logits, labels):
    return F.cross_entropy(logits.double().flatten(0, 1), labels.flatten()).item()


is_as_described = True
for model_class, config, shifts in MODELS:
    torch.manual_seed(0)
    model = model_class(config)
    documentation = model_class.forward.__doc__.replace("*", "").replace("`", "")
    documented = "labels are shifted inside the model, i.e. you can set labels = input_ids"
    is_as_described &= documented in " ".join(documentation.split())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        ids = texts(32)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.eval()
    ids = texts(32)
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids)
    predicted = output.logits.argmax(-1)
    of_next = exact_loss(output.logits[:, :-1], ids[:, 1:])
    of_same = exact_loss(output.logits, ids)
    next_share = (predicted[:, :-1] == ids[:, 1:]).float().mean().item()
    same_share = (predicted == ids).float().mean().item()
    print(f"{model_class.__name__}, trained with labels = input_ids: loss {output.loss:.4f}")
    print(f"    cross-entropy (fp64) of the next tokens {of_next:.4f}, of the same {of_same:.4f}")
    print(f"    {next_share:.0%} of its predictions are the next token,", end=" ")
    print(f"{same_share:.0%} the one it has just read")
    is_as_described &= abs(output.loss.item() - (of_next if shifts else of_same)) < 1e-4
    is_as_described &= (next_share > 0.95 and same_share < 0.05) == shifts
    is_as_described &= (same_share > 0.95 and next_share < 0.05) != shifts
sys.exit(0 if is_as_described else "the labels of XLM and Flaubert are now shifted as documented")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
