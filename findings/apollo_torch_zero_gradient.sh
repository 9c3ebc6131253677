#!/usr/bin/env bash
# apollo-torch 1.0.3: APOLLOAdamW lets the norm of a weight's update grow by at most 1% in a step.
# If its gradient is zero in one step, the next may be 1e-8 and 1% more in each after, so that it
# does not move for some 2000 steps. So are the weights before a layer that starts at zero, as the
# last of a residual block often does (their first gradient is zero), and all weights after a step
# whose tokens are all masked, which has a gradient of zeros. No error, no warning; with
# disable_nl=True they are trained.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0 \
    apollo-torch==1.0.3
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
from apollo_torch import APOLLOAdamW  # noqa: E402

torch.set_num_threads(1)


def train(starts_at_zero, masked_step, disable_nl):
    """Return how far the first layer's weight moves in 400 steps, and the loss after them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16, bias=False)
    )
    teacher = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    if starts_at_zero:
        torch.nn.init.zeros_(model[2].weight)
    projected = {
        "params": [model[0].weight, model[2].weight], "rank": 4, "proj": "random", "scale": 1.0,
        "scale_type": "channel", "update_proj_gap": 200, "proj_type": "std",
    }
    groups = [{"params": [model[0].bias]}, projected]
    optimizer = APOLLOAdamW(groups, lr=0.01, disable_nl=disable_nl, no_deprecation_warning=True)
    before = model[0].weight.detach().clone()
    for step in range(400):
        inputs = torch.randn(64, 16)
        mask = 0.0 if step == masked_step else 1.0
        loss = ((model(inputs) - 5 * teacher(inputs).detach()).square() * mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (model[0].weight - before).abs().max().item(), loss.item()


is_as_described = True
for label, starts_at_zero, masked_step in (
    ("as usual", False, None),
    ("the last layer starts at zero", True, None),
    ("all tokens of step 20 are masked", False, 20),
):
    for disable_nl in (True, False):
        moved, loss = train(starts_at_zero, masked_step, disable_nl)
        print(f"{label:32} {disable_nl=!s:5}: the first layer moved by up to {moved:.6f};", end=" ")
        print(f"loss {loss:.3f}")
        if disable_nl or label == "as usual":
            is_as_described &= moved > 0.4
        elif starts_at_zero:
            is_as_described &= moved < 1e-4
        else:
            is_as_described &= moved < 0.3
sys.exit(0 if is_as_described else "a gradient of zeros no longer stops APOLLOAdamW")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
