#!/usr/bin/env bash
# torch 2.13.0: with fused=True, Adam, AdamW, SGD and Adagrad on CPU go through the memory of
# parameter and gradient in order, whatever their strides. A parameter that is a slice of columns of
# a larger weight is trained in its first rows alone, and the rest of that weight is overwritten;
# a gradient from torch.autograd.grad that lies transposed goes to other elements. No error, no
# warning; with fused=False both are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW


def slice_of_columns(optimizer_class, is_fused):
    """Train the left half of a weight; return how far the left and the right half have moved."""
    whole = torch.zeros(4, 4)
    parameter = torch.nn.Parameter(whole[:, :2])
    optimizer = optimizer_class([parameter], lr=1.0, fused=is_fused)
    parameter.sum().backward()
    optimizer.step()
    return whole[:, :2].abs().sum(1).tolist(), whole[:, 2:].abs().sum(1).tolist()


def gradient_of_einsum(optimizer_class, is_fused):
    """Return the gradient and the step of a weight used by an einsum."""
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = optimizer_class([weight], lr=1.0, fused=is_fused)
    x = torch.tensor([[[1.0, -1.0, 1.0]]])
    loss = (torch.einsum("btd,vd->btv", x, weight) * torch.tensor([1.0, 2.0])).sum()
    (weight.grad,) = torch.autograd.grad(loss, [weight])
    gradient = weight.grad.clone()
    optimizer.step()
    return gradient, -weight.detach()


is_as_described = True
for optimizer_class in (SGD, Adam, AdamW, Adagrad):
    for is_fused in (False, True):
        left, right = slice_of_columns(optimizer_class, is_fused)
        left, right = ([round(moved, 4) for moved in moves] for moves in (left, right))
        gradient, step = gradient_of_einsum(optimizer_class, is_fused)
        print(f"{optimizer_class.__name__}, fused={is_fused}")
        print(f"    columns 0 and 1 are a parameter: its rows moved by {left}")
        print(f"    columns 2 and 3 are not:         their rows moved by {right}")
        print(f"    gradient {gradient.tolist()}, strides {gradient.stride()}")
        print(f"    step     {[[round(x, 4) for x in row] for row in step.tolist()]}")
        goes_down = torch.equal(step.sign(), gradient.sign())
        if is_fused:
            is_as_described &= left == right == [2, 2, 0, 0]
            is_as_described &= not goes_down
        else:
            is_as_described &= left == [2, 2, 2, 2] and right == [0, 0, 0, 0]
            is_as_described &= goes_down
sys.exit(0 if is_as_described else "fused optimizers no longer ignore strides")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
