#!/usr/bin/env bash
# litgpt 0.5.13: mark_only_lora_as_trainable(model, bias="lora_only") is to unfreeze the biases of
# layers with LoRA. It looks for the bias of the LoRA layer, but that is the one of the Linear
# inside. So no bias is unfrozen, as with bias="none", and what is trained has fewer parameters
# than asked for. No error, no warning; bias="all" unfreezes all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 litgpt==0.5.13
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable  # noqa: E402

torch.manual_seed(0)
found = {}
for bias in ("none", "lora_only", "all"):
    config = Config(
        n_layer=1, n_head=4, n_embd=32, padded_vocab_size=64, block_size=64, lora_r=4,
        lora_query=True, lora_value=True, lora_mlp=True, bias=True,
    )
    model = GPT(config)
    mark_only_lora_as_trainable(model, bias=bias)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found[bias] = [name for name in names if "lora_" not in name]
    print(f"{bias=}: {len(names)} parameters are to be trained, of which biases: {found[bias]}")
expected = ["attn.qkv.linear.bias", "mlp.fc.linear.bias", "mlp.proj.linear.bias"]
print(f"biases of layers with LoRA are, of the block, {expected}")
is_as_described = found["none"] == found["lora_only"] == []
is_as_described &= all(f"transformer.h.0.{name}" in found["all"] for name in expected)
sys.exit(0 if is_as_described else 'bias="lora_only" unfreezes biases')
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
