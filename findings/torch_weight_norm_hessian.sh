#!/usr/bin/env bash
# torch 2.13.0: the second derivatives of a layer with weight_norm (of nn.utils.parametrizations,
# and the older nn.utils.weight_norm) by its direction, original1, are wrong: its backward, where
# it is differentiated again, takes the lengths of the vectors as constants. So Hessians, their
# products with vectors, and gradients through an inner step of training (MAML) are wrong. First
# derivatives are right, as are second ones of the same formula by hand, and with dim=None. No
# error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(0)
x = torch.randn(8, 5, dtype=torch.float64)
target = torch.randn(8, 3, dtype=torch.float64)


class ByHand(nn.Module):
    """The formula that weight_norm documents, with dim=0."""

    def forward(self, length, direction):
        return length * direction / direction.norm(dim=1, keepdim=True)

    def right_inverse(self, weight):
        return weight.norm(dim=1, keepdim=True), weight


def by_hand(layer):
    parametrize.register_parametrization(layer, "weight", ByHand())
    return layer


def gradient(layer, direction):
    """Return the gradient of a loss by direction, and the loss's graph."""
    loss = (layer(x) - target).square().sum()
    return torch.autograd.grad(loss, direction, create_graph=True)[0]


def change_of_loss(layer, direction, step):
    with torch.no_grad():
        direction.add_(step)
        above = (layer(x) - target).square().sum().item()
        direction.sub_(2 * step)
        below = (layer(x) - target).square().sum().item()
        direction.add_(step)
    return (above - below) / 2


def change_of_gradient(layer, direction, step):
    with torch.no_grad():
        direction.add_(step)
    above = gradient(layer, direction)
    with torch.no_grad():
        direction.sub_(2 * step)
    below = gradient(layer, direction)
    with torch.no_grad():
        direction.add_(step)
    return ((above - below) / 2).detach()


is_as_described = True
for name, make in (
    ("weight_norm, dim=0", weight_norm),
    ("weight_norm, dim=1", lambda layer: weight_norm(layer, dim=1)),
    ("weight_norm, dim=None", lambda layer: weight_norm(layer, dim=None)),
    ("by hand", by_hand),
):
    layer = make(nn.Linear(5, 3).double())
    direction = layer.parametrizations.weight.original1
    vector = torch.randn_like(direction)
    first = gradient(layer, direction)
    product = torch.autograd.grad((first * vector).sum(), direction)[0]
    step = 1e-6 * vector
    slope = (first * vector).sum().item()
    first_error = abs(change_of_loss(layer, direction, step) / 1e-6 - slope) / abs(slope)
    measured = change_of_gradient(layer, direction, step) / 1e-6
    second_error = ((product - measured).norm() / measured.norm()).item()
    print(
        f"{name:22} relative error of the first derivative {first_error:.1e}, "
        f"of Hessian times vector {second_error:.1e}"
    )
    is_as_described &= first_error < 1e-6
    is_right = second_error < 1e-6
    is_as_described &= is_right if name in ("by hand", "weight_norm, dim=None") else not is_right
    is_as_described &= is_right or second_error > 0.1
sys.exit(0 if is_as_described else "the second derivatives of weight_norm have changed")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
