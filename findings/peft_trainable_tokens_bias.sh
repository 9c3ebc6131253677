#!/usr/bin/env bash
# peft 0.21.2: TrainableTokens on an nn.Linear that has a bias leaves the bias out of its result.
# An adapter that has learned nothing changes the output by exactly the bias, without a warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" - <<'PROGRAM'
import sys

import torch
from peft import TrainableTokensConfig, get_peft_model
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=True)

    def forward(self, ids):
        return self.head(self.embed(ids))


torch.manual_seed(0)
model, ids = Model(), torch.arange(5)
with torch.no_grad():
    before = model(ids)
    bias = model.head.bias.clone()
    # init_weights=True: the trained rows begin as those of the layer.
    config = TrainableTokensConfig(token_indices=[1, 2], target_modules=["head"], init_weights=True)
    after = get_peft_model(model, config)(ids)
missing = before - after
print("largest difference of an adapter that has learned nothing:", missing.abs().max().item())
print("largest distance of that difference from the bias:", (missing - bias).abs().max().item())
is_as_described = missing.abs().max() > 0.1 and torch.allclose(missing, bias.expand_as(missing))
sys.exit(0 if is_as_described else "the bias is no longer left out")
PROGRAM
