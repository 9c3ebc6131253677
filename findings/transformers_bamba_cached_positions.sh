#!/usr/bin/env bash
# transformers 5.24.0: Bamba called with a cache and without position_ids, which are optional,
# counts the positions of the new tokens from 0 again instead of from where the cache ends. So its
# attention layers rotate them wrongly, and one token at a time gives other logits than the whole
# sequence. No error, no warning; with position_ids, which generate() passes, they are right, and
# Llama's are right both ways.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from transformers import BambaConfig, BambaForCausalLM, LlamaConfig, LlamaForCausalLM

LENGTH = 12
shape = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}
MODELS = (
    (LlamaForCausalLM, LlamaConfig(**shape)),
    (
        BambaForCausalLM,
        BambaConfig(
            **shape, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8,
            mamba_n_groups=2, pad_token_id=0,
        ),
    ),
)
torch.manual_seed(0)
ids = torch.randint(1, 64, (2, LENGTH))
is_as_described = True
for model_class, config in MODELS:
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)  # the logits of fresh models are small
        whole = model(ids, use_cache=False).logits
        print(f"{model_class.__name__}: logits up to {whole.abs().max():.2f}, one token at a time")
        for has_positions in (True, False):
            cache, steps = None, []
            for i in range(LENGTH):
                positions = {"position_ids": torch.full((2, 1), i)} if has_positions else {}
                output = model(ids[:, i : i + 1], cache=cache, use_cache=True, **positions)
                cache = output.cache
                steps.append(output.logits)
            change = (torch.cat(steps, 1) - whole).abs().max().item()
            setting = "with" if has_positions else "without"
            print(f"    {setting} position_ids: change by {change:.6f}")
            is_wrong = model_class is BambaForCausalLM and not has_positions
            is_as_described &= (change > 0.1) if is_wrong else (change < 1e-3)
sys.exit(0 if is_as_described else "Bamba now counts positions from where the cache ends")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
