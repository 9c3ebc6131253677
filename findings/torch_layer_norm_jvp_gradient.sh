#!/usr/bin/env bash
# torch 2.13.0: the gradient of a loss that has a jvp of F.layer_norm in it, as sliced score
# matching or a penalty of directional derivatives, is wrong for what comes before the layer: it is
# that with the layer's mean and standard deviation as constants in the derivative. The loss is
# right, and so is the gradient of the same loss with a vjp, twice backward. F.instance_norm and
# F.batch_norm in training are alike; F.group_norm and F.rms_norm are right. No error, no warning.
# (The authors know of it: issue 198017 of pytorch/pytorch, open in September 2026, lists both
# layers.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vjp

torch.manual_seed(0)
x = torch.randn(4, 6, dtype=torch.float64)
direction = torch.randn_like(x)
weight = torch.randn(6, 6, dtype=torch.float64)
step = 1e-6 * torch.randn_like(weight)
norms = {
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "instance_norm": lambda x: F.instance_norm(x[None])[0],
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
}


def losses(norm):
    """Return <v, J v> of the layer with norm, as a function of its weight: by jvp and by vjp."""

    def by_jvp(weight):
        return (jvp(lambda x: norm(x @ weight), (x,), (direction,))[1] * direction).sum()

    def by_vjp(weight):
        return (vjp(lambda x: norm(x @ weight), x)[1](direction)[0] * direction).sum()

    return by_jvp, by_vjp


is_as_described = True
for name, norm in norms.items():
    # How much the loss changes along a small step, measured, and by the gradients.
    by_jvp, by_vjp = losses(norm)
    measured = (by_jvp(weight + step) - by_jvp(weight - step)).item() / 2e-6
    changes = [(grad(loss)(weight) * step).sum().item() / 1e-6 for loss in (by_jvp, by_vjp)]
    print(
        f"{name:13} loss {by_jvp(weight).item():8.4f} by jvp, {by_vjp(weight).item():8.4f} by vjp; "
        f"slope {measured:8.4f}, by the gradient of the jvp {changes[0]:8.4f}, "
        f"of the vjp {changes[1]:8.4f}"
    )
    is_as_described &= abs(by_jvp(weight) - by_vjp(weight)).item() < 1e-9
    is_as_described &= abs(changes[1] - measured) < 1e-4 * abs(measured)
    is_right = abs(changes[0] - measured) < 1e-4 * abs(measured)
    is_as_described &= is_right == (name in ("group_norm", "rms_norm"))
sys.exit(0 if is_as_described else "the gradient of a jvp of normalization layers has changed")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
