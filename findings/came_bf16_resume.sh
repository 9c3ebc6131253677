#!/usr/bin/env bash
# came-pytorch 0.1.3: CAME keeps its averages in fp32 where parameters are bf16, but load_state_dict
# (PyTorch's, which casts a state to its parameter's dtype unless an optimizer overrides that) makes
# them bf16. In bf16 an average times 0.999 or 0.9999 is itself, so after resuming averages of
# squared gradients no longer forget: where gradients become small, so do steps. No error, no
# warning; a run that isn't interrupted goes on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 came-pytorch==0.1.3
cat > "$folder/program.py" <<'PROGRAM'
import io
import sys

import torch
from came_pytorch import CAME

before, after = 50, 1500


def make(weights):
    parameter = torch.nn.Parameter(weights.clone())
    return parameter, CAME([parameter], lr=1e-4)


def step(parameter, optimizer, size):
    """Step along a gradient of a given size, the same each time."""
    parameter.grad = (size * directions).bfloat16()
    optimizer.step()


def summary(optimizer, parameter):
    state = optimizer.state[parameter]
    row = state["exp_avg_sq_row"]
    return row.dtype, row.float().mean().item()


torch.manual_seed(0)
directions = torch.randn(16, 16)
weights = torch.randn(16, 16).bfloat16()
parameter, optimizer = make(weights)
for _ in range(before):
    step(parameter, optimizer, 1.0)
file = io.BytesIO()
torch.save((parameter.detach(), optimizer.state_dict()), file)
file.seek(0)
saved_weights, saved_state = torch.load(file)
resumed, resumed_optimizer = make(saved_weights)
resumed_optimizer.load_state_dict(saved_state)
dtype, at_stop = summary(optimizer, parameter)
saved_dtype = saved_state["state"][0]["exp_avg_sq_row"].dtype
for _ in range(after):
    step(parameter, optimizer, 0.01)
    step(resumed, resumed_optimizer, 0.01)
_, average = summary(optimizer, parameter)
resumed_dtype, resumed_average = summary(resumed_optimizer, resumed)
print(f"after {before} steps with gradients of 1: average of squares {at_stop:.4f},", end=" ")
print(f"{dtype}, saved as {saved_dtype}")
print(f"after {after} more with gradients of 0.01:")
print(f"    uninterrupted {average:.4f}, expected {at_stop * 0.999**after:.4f}")
print(f"    resumed       {resumed_average:.4f}, {resumed_dtype}")
is_as_described = dtype == saved_dtype == torch.float32 and resumed_dtype == torch.bfloat16
is_as_described &= abs(average / (at_stop * 0.999**after) - 1) < 0.05
is_as_described &= abs(resumed_average / at_stop - 1) < 0.02
sys.exit(0 if is_as_described else "averages of a resumed CAME now forget")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
