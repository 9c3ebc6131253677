#!/usr/bin/env bash
# transformers 5.24.0: Llama4ForConditionalGeneration called with text alone raises an
# AttributeError about image_outputs, though images are optional.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PROGRAM'
import sys

import torch
from transformers import Llama4Config, Llama4ForConditionalGeneration

text = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 64,
}
vision = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16,
    "projector_output_dim": 16,
}
config = Llama4Config(text_config=text, vision_config=vision)
model = Llama4ForConditionalGeneration(config)
try:
    model(input_ids=torch.arange(8)[None])
except AttributeError as error:
    print("AttributeError:", error)
    sys.exit(0 if "image_outputs" in str(error) else "it fails for another reason")
sys.exit("it no longer fails")
PROGRAM
