#!/usr/bin/env bash
# transformers 5.24.0: Moshi's decoder, with sdpa or eager attention, keeps to its sliding_window
# (3000 positions by default) only with a cache, which drops older keys. Without one, as in
# training, each position attends to all before it. So beyond the window a model is trained on
# something else than it generates by, and the logits of a whole sequence are not those of the same
# tokens one at a time. No error, no warning; Mistral's are the same both ways.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from transformers import MistralConfig, MistralForCausalLM, MoshiConfig, MoshiForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
WINDOW, LENGTH = 6, 14
shape = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "sliding_window": WINDOW,
    "max_position_embeddings": 64,
}
torch.manual_seed(0)
ids = torch.randint(64, (1, LENGTH))
other = ids.clone()
other[:, : LENGTH - WINDOW] = (ids[:, : LENGTH - WINDOW] + 20) % 64  # outside the last one's window
is_as_described = True
for model_class, config in (
    (MistralForCausalLM, MistralConfig(**shape, intermediate_size=64)),
    (MoshiForCausalLM, MoshiConfig(**shape, ffn_dim=64)),
):
    for attention in ("sdpa", "eager"):
        config._attn_implementation = attention
        torch.manual_seed(0)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.2)  # the logits of fresh models are small
            whole = model(ids, use_cache=False).logits[0]
            by_old = (model(other, use_cache=False).logits[0, -1] - whole[-1]).abs().max().item()
            past, steps = None, []
            for token in ids[0]:
                output = model(token[None, None], cache=past, use_cache=True)
                past = output.cache
                steps.append(output.logits[0, 0])
        by_step = (torch.stack(steps) - whole).abs().amax(1)
        inside, beyond = by_step[:WINDOW].max().item(), by_step[WINDOW:].max().item()
        print(f"{model_class.__name__}, {attention}: logits up to {whole.abs().max():.2f}")
        print(f"    of the last position, by tokens outside its window: change by {by_old:.4f}")
        print(f"    one token at a time: change by {inside:.4f} in the first window,", end=" ")
        print(f"by {beyond:.4f} beyond")
        is_as_described &= inside < 1e-4
        if model_class is MoshiForCausalLM:
            is_as_described &= by_old > 0.1 and beyond > 0.1
        else:
            is_as_described &= by_old < 1e-4 and beyond < 1e-4
sys.exit(0 if is_as_described else "Moshi now keeps to its window without a cache as well")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
