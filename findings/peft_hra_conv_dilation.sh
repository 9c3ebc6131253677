#!/usr/bin/env bash
# peft 0.21.2: HRA and BOFT on a Conv2d with dilation compute it without dilation. An adapter that
# has learned nothing so changes the output. No error, no warning (OFT refuses dilation).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
"$folder/venv/bin/python" - <<'PROGRAM'
import sys

import torch
from peft import HRAConfig, get_peft_model
from torch import nn


def outputs(dilation):
    """Return the outputs of a layer before and after it got an adapter that does nothing yet."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, dilation=dilation)).eval()
    image = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        before = model(image)
        adapted = get_peft_model(model, HRAConfig(r=2, target_modules=["0"])).eval()
        return before, adapted(image)


plain_before, plain_after = outputs(dilation=1)
before, after = outputs(dilation=2)
print("largest difference without dilation:", (plain_before - plain_after).abs().max().item())
print("shapes with dilation 2, before and after:", tuple(before.shape), tuple(after.shape))
is_plain_right = torch.allclose(plain_before, plain_after, atol=1e-5)
is_as_described = is_plain_right and before.shape[-2:] == (4, 4) and after.shape[-2:] == (6, 6)
sys.exit(0 if is_as_described else "dilation is no longer left out")
PROGRAM
