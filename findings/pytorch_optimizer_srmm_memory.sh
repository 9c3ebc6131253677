#!/usr/bin/env bash
# pytorch-optimizer 4.1.0: SRMM averages gradients and parameters, weighting the n-th step by
# (n + 1)^-beta, where n begins again every memory_length steps; None is for no such refreshing. But
# with None n begins again at each step: the weight is always 1, nothing is averaged, and SRMM is
# plain SGD, whatever beta is. No error, no warning; a memory_length beyond the last step is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 pytorch-optimizer==4.1.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from pytorch_optimizer import SRMM

torch.set_num_threads(1)
STEPS, LEARNING_RATE = 50, 0.05


def by_hand(parameters, gradients, beta):
    """Return the parameters after averaged steps that are never refreshed."""
    mean_gradient, mean = torch.zeros_like(parameters), torch.zeros_like(parameters)
    for n, gradient in enumerate(gradients, start=1):
        weight = (n + 1) ** -beta
        mean_gradient = (1 - weight) * mean_gradient + weight * gradient
        mean = (1 - weight) * mean + weight * parameters - LEARNING_RATE * mean_gradient
        parameters = mean
    return parameters


torch.manual_seed(0)
start = torch.randn(5, dtype=torch.float64)
gradients = torch.randn(STEPS, 5, dtype=torch.float64)
sgd = start - LEARNING_RATE * gradients.sum(0)

is_as_described = True
for beta in (0.5, 0.9):
    expected = by_hand(start, gradients, beta)
    for memory_length in (10 * STEPS, None):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = SRMM([parameter], lr=LEARNING_RATE, beta=beta, memory_length=memory_length)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        from_expected = (parameter - expected).abs().max().item()
        from_sgd = (parameter - sgd).abs().max().item()
        print(f"{beta=}, {memory_length=}, after {STEPS} steps: {from_expected:.1e} away", end=" ")
        print(f"from averaging without refreshing, {from_sgd:.1e} from plain SGD")
        is_as_described &= (from_sgd if memory_length is None else from_expected) < 1e-12
        is_as_described &= (from_expected if memory_length is None else from_sgd) > 0.05
sys.exit(0 if is_as_described else "SRMM without refreshing is no longer plain SGD")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
