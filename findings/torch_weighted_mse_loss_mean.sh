#!/usr/bin/env bash
# torch 2.13.0: F.mse_loss, l1_loss and huber_loss take a weight, and by the documentation of all
# three reduction="mean" is the mean of what "none" returns. It is for huber_loss. mse_loss and
# l1_loss divide by the sum of the weights instead, so that loss and gradient have another size,
# weights twice as large change nothing, and weights that are all 0, as of a batch of padding, give
# NaN. No error, no warning. Without weights a huber_loss of large delta is half of mse_loss.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys

import torch
import torch.nn.functional as F

target = torch.zeros(4)
losses = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "2 * huber_loss": lambda *args, **kwargs: 2 * F.huber_loss(*args, delta=100.0, **kwargs),
}
all_weights = (None, [1.0, 1, 1, 1], [2.0, 2, 2, 2], [1.0, 0, 0, 0], [0.0, 0, 0, 0])


def agree(one, other):
    return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))


is_as_described = True
for weights in all_weights:
    print(f"x = 4, 1, 1, 2, weight {weights}")
    weight = None if weights is None else torch.tensor(weights)
    for name, loss_of in losses.items():
        x = torch.tensor([4.0, 1.0, 1.0, 2.0], requires_grad=True)
        loss = loss_of(x, target, weight=weight)
        loss.backward()
        mean = loss_of(x, target, weight=weight, reduction="none").mean().item()
        print(
            f'    {name:14} "mean" {loss.item():6.3f}, the mean of "none" {mean:6.3f}, '
            f"gradient {[round(value, 3) for value in x.grad.tolist()]}"
        )
        expected = mean
        if weights is not None and name != "2 * huber_loss":
            expected = mean * 4 / sum(weights) if any(weights) else math.nan
        is_as_described &= agree(loss.item(), expected)
        is_as_described &= bool(x.grad.isnan().any()) == math.isnan(expected)
sys.exit(0 if is_as_described else "the weighted losses take their mean otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
