#!/usr/bin/env bash
# torchtune 0.6.1: "with disable_kv_cache(model)" is for "normal forward passes" of a model whose
# caches are set up. These need no mask, as without caches. But without one each position then
# attends to all others, later ones too: attention is causal by default only if there is no cache,
# not if it is disabled. So a loss measured or trained so sees the tokens it is to predict. No
# error, no warning; with a causal mask, and after delete_kv_caches, it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchtune==0.6.1 torchao==0.9.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys

import torch
from torchtune.models.llama3 import llama3
from torchtune.modules.common_utils import delete_kv_caches, disable_kv_cache

logging.disable()
torch.manual_seed(0)
model = llama3(
    vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=32,
    intermediate_dim=64,
)
tokens = torch.randint(64, (2, 16))
changed = torch.cat([tokens[:, :8], (tokens[:, 8:] + 1) % 64], dim=1)
causal = torch.ones(2, 16, 16, dtype=torch.bool).tril()


@torch.no_grad()
def show(label, **options):
    """Return how much the logits of the first 8 tokens change if the tokens after them do."""
    difference = (model(tokens, **options) - model(changed, **options))[:, :8].abs().max().item()
    print(f"{label:40} the first 8 tokens' logits change by {difference:.6f} with later tokens")
    return difference


rights = [show("no caches:")]
model.setup_caches(batch_size=2, dtype=torch.float32, decoder_max_seq_len=32)
with disable_kv_cache(model):
    rights.append(show("caches disabled, with a causal mask:", mask=causal))
    wrong = show("caches disabled, without a mask:")
delete_kv_caches(model)
rights.append(show("caches deleted:"))
is_as_described = max(rights) < 1e-4 and wrong > 0.1
sys.exit(0 if is_as_described else "attention is causal with disabled caches")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
