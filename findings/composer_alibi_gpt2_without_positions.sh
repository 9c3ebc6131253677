#!/usr/bin/env bash
# composer (mosaicml) 0.32.1 with transformers 4.53.3, the newest that it allows: apply_alibi(),
# and the algorithm Alibi that calls it, zero and freeze GPT-2's position embeddings and replace
# the method _attn of its attention, which this transformers no longer calls. So the biases of
# ALiBi are never added, and the model is left without any positions: of one layer, the
# prediction after a text is the same in whatever order its tokens are. No error, no warning,
# whether attention is eager or that of torch. BERT, whose forward is replaced, gets its biases.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.7.0 numpy==2.2.6 mosaicml==0.32.1 \
    transformers==4.53.3
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
logging.disable()
from composer.functional import apply_alibi  # noqa: E402
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel  # noqa: E402

VOCAB_SIZE, LENGTH = 50, 12
torch.manual_seed(0)
ids = torch.randint(VOCAB_SIZE, (1, LENGTH))
reordered = torch.cat([ids[:, torch.randperm(LENGTH - 1)], ids[:, -1:]], dim=1)


def make_gpt2(attention):
    config = GPT2Config(
        n_layer=1, n_head=4, n_embd=32, vocab_size=VOCAB_SIZE, n_positions=64,
        initializer_range=0.3, attn_implementation=attention,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def make_bert(attention):
    config = BertConfig(
        num_hidden_layers=1, num_attention_heads=4, hidden_size=32, intermediate_size=64,
        vocab_size=VOCAB_SIZE, max_position_embeddings=64, initializer_range=0.3,
        attn_implementation=attention,
    )  # fmt: skip
    return BertForMaskedLM(config).eval()


@torch.no_grad()
def largest_change(model):
    """Return that of the last token's logits, if the tokens before it change places."""
    return (model(ids).logits - model(reordered).logits)[:, -1].abs().max().item()


@torch.no_grad()
def biases_count(model):
    """Tell whether logits change with the biases of ALiBi."""
    before = model(ids).logits
    for module in model.modules():
        if hasattr(module, "alibi"):
            module.alibi.mul_(2)
    return not torch.equal(before, model(ids).logits)


is_as_described = True
for name, make in (("GPT-2", make_gpt2), ("BERT", make_bert)):
    for attention in ("eager", "sdpa"):
        torch.manual_seed(1)
        model = make(attention)
        before = largest_change(model)
        apply_alibi(model, max_sequence_length=64)
        after = largest_change(model)
        counts = biases_count(model)
        print(f"{name}, {attention} attention: another order changes the last logits by up to")
        print(f"    {before:.6f} with its own positions, {after:.6f} after apply_alibi,", end=" ")
        print(f"whose biases {'count' if counts else 'do not count'}")
        is_as_described &= before > 0.01
        if name == "GPT-2":
            is_as_described &= after < 1e-4 and not counts
        else:
            is_as_described &= after > 0.01 and counts
sys.exit(0 if is_as_described else "GPT-2 now has the biases of ALiBi")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
