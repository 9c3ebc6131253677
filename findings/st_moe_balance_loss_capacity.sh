#!/usr/bin/env bash
# st-moe-pytorch 0.1.8: the balance loss of MoE counts only tokens that found a place in their
# expert. In the paper (ST-MoE, arXiv 2202.08906) it counts each token's best expert, whether full
# or not. Here the mask of best experts is a view of the one that loses what is beyond the capacity
# before it is counted. So if all tokens choose one of 8 experts, the loss is 1.25
# (capacity_factor_train) in place of 8, and its gradient is as much too small. With capacity for
# all it is as in the paper.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 st-moe-pytorch==0.1.8 \
    colt5-attention==0.11.2
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys

import torch
import torch.nn.functional as F
from st_moe_pytorch import MoE

experts, batch, length, dim = 8, 4, 64, 16


def of_paper(logits):
    """Return experts * sum(f * P), their mean: f by best experts, P mean probabilities."""
    probabilities = logits.softmax(-1)
    chosen = F.one_hot(logits.argmax(-1), experts).double().mean(1)
    return experts * (chosen * probabilities.mean(1)).sum(-1).mean()


is_as_described = True
for push, name in ((0.0, "as initialized"), (0.5, "one is preferred"), (5.0, "one takes all")):
    torch.manual_seed(0)
    moe = MoE(dim, num_experts=experts).double()
    weight = moe.gate.to_gates.weight
    x = torch.randn(batch, length, dim, dtype=torch.float64)
    x[..., 0] = 4
    with torch.no_grad():
        weight[:, 0] = 0
        weight[3, 0] = push
    expected = of_paper(moe.gate.to_gates(x))
    (expected_gradient,) = torch.autograd.grad(expected, weight)
    expected = expected.item()
    print(f"{name}: the paper's balance loss is {expected:.3f}")
    for capacity_factor in (1.25, 2.0, float(experts)):
        moe.gate.capacity_factor_train = capacity_factor
        balance_loss = moe(x).balance_loss
        (gradient,) = torch.autograd.grad(balance_loss, weight)
        balance_loss = balance_loss.item()
        norms = (gradient.norm() / expected_gradient.norm()).item()
        print(f"    capacity factor {capacity_factor:.2f}: {balance_loss:.3f};", end=" ")
        print(f"norm of its gradient: {norms:.2f} times the paper's")
        if capacity_factor == experts:
            is_as_described &= math.isclose(balance_loss, expected, rel_tol=1e-5)
            is_as_described &= math.isclose(norms, 1, rel_tol=1e-4)
        elif push == 5:
            is_as_described &= math.isclose(balance_loss, capacity_factor, rel_tol=1e-3)
            is_as_described &= math.isclose(norms, capacity_factor / experts, rel_tol=0.1)
is_as_described &= math.isclose(expected, experts, rel_tol=1e-3)
sys.exit(0 if is_as_described else "the balance loss now counts tokens beyond the capacity")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
