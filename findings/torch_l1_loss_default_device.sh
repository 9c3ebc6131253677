#!/usr/bin/env bash
# torch 2.13.0: F.l1_loss ignores its weight after torch.set_default_device(...), also of the device
# that the tensors are on, and within "with torch.device(...)". Elements of weight 0, as padding,
# then count in full, in loss and gradient. (Such a default is a mode that sees calls first, and
# l1_loss hands its weight on neither to a mode nor to a subclass of Tensor.) No error, no warning;
# mse_loss and huber_loss are the same with a default device and without.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F

target = torch.zeros(4)
weight = torch.tensor([1.0, 1.0, 0.0, 0.0])  # the last two are padding


def loss_and_gradient(loss_of):
    x = torch.tensor([1.0, -2.0, 30.0, 40.0], requires_grad=True)
    loss = loss_of(x, target, weight=weight)
    loss.backward()
    return [loss.item(), *x.grad.tolist()]


losses = (F.l1_loss, F.mse_loss, F.huber_loss)
without = [loss_and_gradient(loss_of) for loss_of in losses]
with torch.device("cpu"):
    within = [loss_and_gradient(loss_of) for loss_of in losses]
torch.set_default_device("cpu")
default = [loss_and_gradient(loss_of) for loss_of in losses]

for number, loss_of in enumerate(losses):
    print(f"{loss_of.__name__} of 1, -2, 30, 40 and 0 with weights {weight.tolist()}")
    for name, found in (
        ("no default device", without),
        ('with torch.device("cpu")', within),
        ('set_default_device("cpu")', default),
    ):
        loss, *gradient = found[number]
        print(f"    {name:26} {loss:6}, gradient {gradient}")
is_as_described = without[0] == [1.5, 0.5, -0.5, 0, 0]
is_as_described &= within[0] == default[0] == [18.25, 0.25, -0.25, 0.25, 0.25]
is_as_described &= without[1:] == within[1:] == default[1:]
sys.exit(0 if is_as_described else "l1_loss no longer ignores its weight with a default device")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
