#!/usr/bin/env bash
# torch 2.13.0: in forward mode (torch.func.jvp and jacfwd) F.cross_entropy and F.nll_loss of class
# indices, and F.binary_cross_entropy, are constants in their weight: its tangent is dropped. So
# learned weights of classes or examples get derivatives of 0, or wrong ones where the logits depend
# on them too. No error, no warning. In backward such a weight raises an error that it is not
# differentiable; cross_entropy of class probabilities is right in both modes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F

torch.manual_seed(0)
logits = torch.randn(6, 3, dtype=torch.float64)
labels = torch.tensor([0, 1, 2, 0, 1, 2])
one_hot = F.one_hot(labels, 3).double()
weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
losses = {
    "cross_entropy of indices": lambda w: F.cross_entropy(logits, labels, weight=w),
    "nll_loss": lambda w: F.nll_loss(logits.log_softmax(1), labels, weight=w),
    "binary_cross_entropy": lambda w: F.binary_cross_entropy(logits.sigmoid(), one_hot, weight=w),
    "cross_entropy of probabilities": lambda w: F.cross_entropy(logits, one_hot, weight=w),
}


def by_differences(loss, step=1e-6):
    steps = step * torch.eye(3, dtype=torch.float64)
    return torch.stack([(loss(weight + s) - loss(weight - s)) / (2 * step) for s in steps])


def by_backward(loss):
    leaf = weight.clone().requires_grad_()
    try:
        return torch.autograd.grad(loss(leaf), leaf)[0].tolist()
    except RuntimeError as error:
        return str(error).splitlines()[0]


is_as_described = True
for name, loss in losses.items():
    expected, backward = by_differences(loss), by_backward(loss)
    forward = torch.func.jacfwd(loss)(weight)
    print(f"{name}: derivatives by the weight of each class")
    print(f"    by differences {[round(value, 5) for value in expected.tolist()]}")
    print(f"    forward mode   {[round(value, 5) for value in forward.tolist()]}")
    print(f"    backward       {backward}")
    is_right = torch.allclose(forward, expected, atol=1e-6)
    is_as_described &= is_right == (name == "cross_entropy of probabilities")
    is_as_described &= is_right or forward.tolist() == [0.0] * 3
    is_as_described &= isinstance(backward, str) != is_right
sys.exit(0 if is_as_described else "forward mode treats weights of losses in another way")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
