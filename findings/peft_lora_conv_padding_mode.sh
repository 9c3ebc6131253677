#!/usr/bin/env bash
# peft 0.21.2: LoRA on a convolution whose padding_mode is not "zeros" pads its own part with zeros.
# So merge_and_unload() changes the outputs at the borders. No error, no warning; with zeros it is
# right. (DoRA, LoHa, LoKr and AdaLoRA do the same.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" - <<'PROGRAM'
import sys

import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def outputs(padding_mode):
    """Return the outputs of a trained adapter: beside the layer, and merged into it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode=padding_mode))
    # init_lora_weights=False: both factors are random, as after training.
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    image = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        return adapted(image), adapted.merge_and_unload()(image)


zeros = torch.subtract(*outputs("zeros")).abs()
circular = torch.subtract(*outputs("circular")).abs()
inside = circular[..., 1:-1, 1:-1]
print("largest difference between adapted and merged, zeros:   ", zeros.max().item())
print("largest difference between adapted and merged, circular:", circular.max().item())
print("of it without the border:                               ", inside.max().item())
is_as_described = zeros.max() < 1e-4 and inside.max() < 1e-4 and circular.max() > 0.1
sys.exit(0 if is_as_described else "merging no longer changes the border")
PROGRAM
