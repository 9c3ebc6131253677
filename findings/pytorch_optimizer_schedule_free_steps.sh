#!/usr/bin/env bash
# pytorch-optimizer 4.1.0: ScheduleFreeWrapper counts steps in group["step"], where optimizers of
# this package count theirs, so that each step counts twice: AdaBelief in the wrapper corrects the
# bias of its averages as if it had taken 2, 4, 6 steps. Its first step is a quarter shorter, and
# weights go another way. An AdamW of PyTorch, which counts by itself, is wrapped right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 pytorch-optimizer==4.1.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from pytorch_optimizer import AdaBelief, ScheduleFreeWrapper

learning_rate, momentum, betas, eps = 1e-2, 0.9, (0.9, 0.999), 1e-16
torch.manual_seed(0)
start = torch.randn(6, dtype=torch.float64)
target = torch.randn(6, dtype=torch.float64)


def gradient_of(y):
    return 2 * (y - target) * torch.tensor([1, 2, 3, 4, 5, 6])


def wrapped(kind, steps, **options):
    parameter = torch.nn.Parameter(start.clone())
    base = kind([parameter], lr=learning_rate, betas=betas, eps=eps, weight_decay=0.0, **options)
    optimizer = ScheduleFreeWrapper(base, momentum=momentum)
    optimizer.train()
    path = []
    for _ in range(steps):
        parameter.grad = gradient_of(parameter.detach())
        optimizer.step()
        path.append(parameter.detach().clone())
    return torch.stack(path), base.param_groups[0]["step"]


def schedule_free(steps, belief, counted_by=1):
    """Compute the same by the formulas of schedule-free learning, Adam and AdaBelief."""
    x, y, z = start.clone(), start.clone(), start.clone()
    average, square = torch.zeros_like(x), torch.zeros_like(x)
    path = []
    for step in range(1, steps + 1):
        gradient = gradient_of(y)
        average = betas[0] * average + (1 - betas[0]) * gradient
        residual = gradient - average if belief else gradient
        square = betas[1] * square + (1 - betas[1]) * residual**2
        if belief:
            square = square + eps
        counted = counted_by * step
        numerator = average / (1 - betas[0] ** counted)
        root = (square / (1 - betas[1] ** counted)).sqrt() + eps
        z = z - learning_rate * numerator / root
        x = x + (z - x) / step
        y = (1 - momentum) * z + momentum * x
        path.append(y.clone())
    return torch.stack(path)


def largest(difference):
    return difference.abs().max().item()


adamw, _ = wrapped(torch.optim.AdamW, 20)
belief, counted = wrapped(AdaBelief, 20)
torch_is_right = largest(adamw - schedule_free(20, belief=False)) < 1e-12
expected = schedule_free(20, belief=True)
twice = schedule_free(20, belief=True, counted_by=2)
error = largest(belief - expected)
error_of_twice = largest(belief - twice)
first = (belief[0] - start).abs().max().item()
first_expected = (expected[0] - start).abs().max().item()
print(f"torch.optim.AdamW in the wrapper is as the formulas say: {torch_is_right}")
print(f"AdaBelief in the wrapper has taken 20 steps, and counted {counted}")
print(f"    its first step moves weights by {first:.5f}, expected {first_expected:.5f}")
print(f"    weights differ by up to {error:.1e} from the formulas,", end=" ")
print(f"by {error_of_twice:.1e} if each step counts twice")
is_as_described = torch_is_right and counted == 40
is_as_described &= error > 1e-3 and error_of_twice < 1e-9
sys.exit(0 if is_as_described else "a step in the wrapper now counts once")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
