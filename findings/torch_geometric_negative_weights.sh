#!/usr/bin/env bash
# torch-geometric 2.8.1: sparse_cross_entropy takes a weight for each label. Negative ones, as its
# code says, scale the class's part of the denominator before softmax, so that -0.1 makes a negative
# that may be a wrong one count a tenth. But it clamps the logarithm of the weight from below, not
# the weight. So every negative weight from -1 to 0 is as if it were -1, and the loss and gradient
# are those without it. No error, no warning; below -1, as to correct for sampling, it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torch-geometric==2.8.1
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from torch_geometric.utils.cross_entropy import sparse_cross_entropy

torch.manual_seed(0)
rows, classes = 4, 6
logits = torch.randn(rows, classes, dtype=torch.float64, requires_grad=True)
positives = torch.tensor([1, 2, 0, 5])
negatives = torch.tensor([3, 4, 5, 1])  # One class of each row, which is scaled.
every_row = torch.arange(rows)
index = torch.stack([every_row.repeat(2), torch.cat([positives, negatives])])


def by_definition(weight):
    scale = torch.ones(rows, classes, dtype=torch.float64)
    scale[every_row, negatives] = abs(weight)
    denominators = (scale * logits.exp()).sum(1)
    return (denominators.log() - logits[every_row, positives]).mean()


def with_gradient(loss):
    return loss, torch.autograd.grad(loss, logits)[0]


plain = with_gradient(torch.nn.functional.cross_entropy(logits, positives))
is_as_described = True
for weight in (-4.0, -2.0, -1.0, -0.5, -0.1, -0.001):
    weights = torch.tensor([1.0] * rows + [weight] * rows, dtype=torch.float64)
    got = with_gradient(sparse_cross_entropy(logits, index, weights))
    expected = with_gradient(by_definition(weight))
    print(f"weight {weight}: loss {got[0]:.6f}, by definition {expected[0]:.6f};", end=" ")
    print(f"gradient off by up to {(got[1] - expected[1]).abs().max():.2e}")
    if weight > -1:
        is_as_described &= all(map(torch.allclose, got, plain))
        is_as_described &= (expected[0] < 0.99 * got[0]).item()
        is_as_described &= (got[1] - expected[1]).abs().max().item() > 0.01
    else:
        is_as_described &= all(map(torch.allclose, got, expected))
sys.exit(0 if is_as_described else "negative weights above -1 are no longer taken for -1")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
