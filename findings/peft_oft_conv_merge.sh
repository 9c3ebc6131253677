#!/usr/bin/env bash
# peft 0.21.2: merge_and_unload() of OFT on a Conv2d gives a layer whose outputs differ from those
# of the adapted one by as much as the adapter changed them. No error, no warning; on an nn.Linear
# they agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" - <<'PROGRAM'
import sys

import torch
from peft import OFTConfig, get_peft_model
from torch import nn


def differences(layer, x):
    """Return what the adapter changes, and what merging changes then, at most."""
    torch.manual_seed(0)
    model = nn.Sequential(layer).eval()
    # init_weights=False: a random rotation, as after training.
    config = OFTConfig(r=2, oft_block_size=0, target_modules=["0"], init_weights=False)
    with torch.no_grad():
        before = model(x)
        adapted = get_peft_model(model, config).eval()
        after = adapted(x)
        merged = adapted.merge_and_unload()(x)
    return (after - before).abs().max().item(), (merged - after).abs().max().item()


torch.manual_seed(1)
linear = differences(nn.Linear(8, 8), torch.randn(4, 8))
conv = differences(nn.Conv2d(8, 8, 3, padding=1), torch.randn(1, 8, 6, 6))
print("Linear: the adapter changes up to %.2g, merging it %.2g" % linear)
print("Conv2d: the adapter changes up to %.2g, merging it %.2g" % conv)
is_as_described = linear[0] > 0.1 and linear[1] < 1e-4 and conv[0] > 0.1 and conv[1] > 0.1
sys.exit(0 if is_as_described else "merging no longer changes the output")
PROGRAM
