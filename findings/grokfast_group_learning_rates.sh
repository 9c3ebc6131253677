#!/usr/bin/env bash
# grokfast-pytorch 0.0.11: GrokFastAdamW divides the learning rate by 1 + grokfast_lamb
# (normalize_lr, "in order for fair comparison"), 3 by default, but not one that a parameter group
# gives itself. So of two groups with the same learning rate, one by the group and one by the
# argument, the first learns 3 times as fast and decays 3 times as much. No error, no warning.
# torch.optim.AdamW treats both alike.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 grokfast-pytorch==0.0.11
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys

import torch
from grokfast_pytorch import GrokFastAdamW

LEARNING_RATE = 1e-3


def moves(kind, gradient, weight_decay):
    """Return how far a weight of 1 gets, its learning rate by the group or by the argument."""
    by_group, by_argument = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    groups = [{"params": [by_group], "lr": LEARNING_RATE}, {"params": [by_argument]}]
    optimizer = kind(groups, lr=LEARNING_RATE, weight_decay=weight_decay)
    for _ in range(20):
        for weight in (by_group, by_argument):
            weight.grad = torch.full((3,), gradient)
        optimizer.step()
    return [1 - weight[0].item() for weight in (by_group, by_argument)]


is_as_described = True
for kind in (torch.optim.AdamW, GrokFastAdamW):
    for name, gradient, weight_decay in (("gradient 1", 1.0, 0.0), ("weight decay", 0.0, 1e-3)):
        group, argument = moves(kind, gradient, weight_decay)
        print(f"{kind.__name__}, {name}: 20 steps move the group's weight by {group:.6f},", end=" ")
        print(f"the other one by {argument:.6f}: {group / argument:.3f} times")
        expected = 1 if kind is torch.optim.AdamW else 3
        is_as_described &= math.isclose(group / argument, expected, rel_tol=0.03)
sys.exit(0 if is_as_described else "learning rates of groups are now normalized")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
