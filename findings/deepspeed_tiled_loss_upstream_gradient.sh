#!/usr/bin/env bash
# deepspeed 0.19.8: TiledFusedLogitsLoss makes gradients in forward. Its backward multiplies that of
# the hidden states by the upstream gradient, but not those that it has put into .grad of the
# weights. So of a loss divided by N for N accumulated steps the output layer's gradient is N times
# too large, and weights or scales of a loss do not reach it. Even a loss that is only looked at
# leaves a gradient. No error, no warning; with an upstream gradient of 1 all is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet deepspeed==0.19.8
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

torch.set_num_threads(1)
torch.manual_seed(0)
hidden = torch.randn(1, 8, 4, dtype=torch.float64)
labels = torch.randint(6, (1, 8))
weight = torch.randn(6, 4, dtype=torch.float64)


def loss_of_tile(head, x, y):
    return F.cross_entropy(head(x), y)


def gradients(factor, tiled, with_backward=True):
    """Return the gradients of hidden and of the head's weight of factor * mean loss."""
    head = torch.nn.Linear(4, 6, bias=False, dtype=torch.float64)
    head.weight.data.copy_(weight)
    x = hidden.clone().requires_grad_()
    if tiled:
        loss = TiledFusedLogitsLoss.apply(
            loss_of_tile, head, x, labels, None, 2, [head.weight], "mean"
        )
    else:
        loss = F.cross_entropy(head(x).flatten(0, 1), labels.flatten())
    if with_backward:
        (factor * loss).backward()
    return x.grad, head.weight.grad


is_as_described = True
for factor in (1.0, 0.25, 1024.0):
    x_tiled, weight_tiled = gradients(factor, True)
    x_plain, weight_plain = gradients(factor, False)
    x_ratio = (x_tiled.norm() / x_plain.norm()).item()
    weight_ratio = (weight_tiled.norm() / weight_plain.norm()).item()
    print(f"{factor} * loss: gradients relative to those without tiles:", end=" ")
    print(f"hidden {x_ratio:.4f}, weight {weight_ratio:.4f}, expected 1 and 1")
    is_as_described &= torch.allclose(x_tiled, x_plain)
    is_as_described &= torch.allclose(weight_tiled, weight_plain / factor)
left = gradients(1.0, True, with_backward=False)[1]
print(f"without backward: gradient of the weight {left if left is None else 'is there'},", end=" ")
print("expected None")
is_as_described &= left is not None
sys.exit(0 if is_as_described else "the weight's gradient is no longer that of an upstream of 1")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
