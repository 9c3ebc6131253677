#!/usr/bin/env bash
# focal-loss-torch 0.1.2: with gamma=0.7, which its README uses throughout, one sample whose right
# class has a probability that rounds to 1 (a logit some 17 above the others in fp32) makes the
# gradients of its logits NaN, and with them those of every weight. The loss itself is right and
# finite, so nothing shows before the optimizer's step. The gradient's limit is 0, as it is in fp64
# and with gamma 1 and 2; with gamma=0 cross entropy is right too. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 focal-loss-torch==0.1.2
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
from focal_loss.focal_loss import FocalLoss

print("torch", torch.__version__, "focal-loss-torch", version("focal-loss-torch"))
features = torch.tensor([[1.0, 0.5], [0.2, -0.3]])
weight = torch.tensor([[20.0, 0.0], [0.0, 0.0], [0.0, -1.0]])
labels = torch.tensor([0, 2])


def loss_and_gradients(gamma, dtype):
    """Return the loss of a linear layer's softmax, and the gradients of its logits and weight."""
    layer = weight.to(dtype).requires_grad_()
    logits = features.to(dtype) @ layer.T
    loss = FocalLoss(gamma=gamma)(logits.softmax(-1), labels)
    return loss.item(), *torch.autograd.grad(loss, (logits, layer))


is_as_described = True
for gamma in (0, 0.7, 1, 2):
    exact, exact_of_logits, exact_of_weight = loss_and_gradients(gamma, torch.float64)
    loss, of_logits, of_weight = loss_and_gradients(gamma, torch.float32)
    print(f"gamma {gamma}: loss {loss:.6f}, in fp64 {exact:.6f}")
    print("    of the confident sample's logits:", of_logits[0].tolist())
    print("    in fp64, at most:                ", exact_of_logits[0].abs().max().item())
    print("    of the weight, NaN:              ", of_weight.isnan().sum().item(), "of 6")
    is_as_described &= abs(loss - exact) < 1e-5 and exact_of_logits[0].abs().max().item() < 1e-5
    if gamma == 0.7:
        is_as_described &= bool(of_logits[0].isnan().all() and of_weight.isnan().all())
    else:
        is_as_described &= torch.allclose(of_weight.double(), exact_of_weight, atol=1e-5)
sys.exit(0 if is_as_described else "the gradient of a confident sample is now a number")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
