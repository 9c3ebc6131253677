#!/usr/bin/env bash
# lion-pytorch 0.2.5: with decoupled_weight_decay=True, each step multiplies parameters by
# 1 - weight_decay, whatever lr is, but only if lr is the one given to Lion itself. A parameter
# group's own lr is divided by Lion's lr, not by the group's first: one ten times as large decays ten
# times as fast. Where groups alone name their lr, Lion's default of 1e-4 counts: lr 1e-2 and weight
# decay 0.01 make every parameter zero in the first step, and 0.02 turns its sign. No error, no
# warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 lion-pytorch==0.2.5
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from lion_pytorch import Lion

print("torch", torch.__version__, "lion-pytorch", version("lion-pytorch"))


def kept(weight_decay, of_group, **of_optimizer):
    """Return what a step with a gradient of zero leaves of a parameter of one."""
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = Lion(
        [{"params": [parameter], **of_group}],
        weight_decay=weight_decay,
        decoupled_weight_decay=True,
        **of_optimizer,
    )
    optimizer.step()
    return parameter[0].item()


cases = {
    "lr 1e-4": (kept(0.01, {}, lr=1e-4), 0.99),
    "lr 1e-2": (kept(0.01, {}, lr=1e-2), 0.99),
    "lr 1e-4, of the group 1e-3": (kept(0.01, {"lr": 1e-3}, lr=1e-4), 0.9),
    "lr of the group 1e-2": (kept(0.01, {"lr": 1e-2}), 0.0),
    "lr of the group 1e-2, weight decay 0.02": (kept(0.02, {"lr": 1e-2}), -1.0),
}
for what, (left, _) in cases.items():
    print(f"{what}: a parameter of 1 becomes {left:.4f}")
is_as_described = all(abs(left - expected) < 1e-9 for left, expected in cases.values())
sys.exit(0 if is_as_described else "Lion now decouples the weight decay of each group")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
