#!/usr/bin/env bash
# torch 2.13.0: F.linear_cross_entropy with LinearCrossEntropyOptions() is NaN if a token is ignored
# and class 0 is banned by a bias of -inf, as a padding id often is. It takes the logit of class 0
# for ignored tokens and multiplies it by 0. Without options the loss is finite; the gradients are
# finite in both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F
from torch.nn import LinearCrossEntropyOptions

T, H, V = 16, 8, 32
torch.manual_seed(0)
hidden, weight = torch.randn(T, H), torch.randn(V, H)
labels = torch.randint(1, V, (T,))
labels[3] = -100  # ignored


def loss_of(banned, options):
    bias = torch.zeros(V)
    bias[banned] = -torch.inf
    counted = torch.where(labels == banned, -100, labels)
    return F.linear_cross_entropy(hidden, weight, counted, linear_bias=bias, options=options)


losses = {}
for banned in (0, 1):
    for name, options in (("no options", None), ("options", LinearCrossEntropyOptions())):
        losses[banned, name] = loss_of(banned, options)
        print(f"class {banned} banned, {name}: {losses[banned, name]:.6f}")
nan = [key for key, loss in losses.items() if loss.isnan()]
sys.exit(0 if nan == [(0, "options")] else "the chunked loss no longer reads class 0")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
