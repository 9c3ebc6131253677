#!/usr/bin/env bash
# pytorch-optimizer 4.1.0: REXScheduler, which decays from max_lr to min_lr, sets the learning rate
# back to min_lr once it is made. So the first step of training has a learning rate of min_lr, 0 by
# default, and none has max_lr. CosineAnnealingWarmupRestarts without warmup does so, too, in its
# first cycle; later cycles start at their maximum. PyTorch's CosineAnnealingWarmRestarts does from
# the first step on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 pytorch-optimizer==4.1.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from pytorch_optimizer.lr_scheduler import CosineAnnealingWarmupRestarts, REXScheduler
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts


def steps_of(kind, **options):
    """Return how far each step moves a parameter whose gradient is one."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = kind(optimizer, **options)
    lengths = []
    for _ in range(10):
        before = parameter.item()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()
        lengths.append(before - parameter.item())
    return lengths


def show(name, lengths):
    print(f"{name:30}", " ".join(f"{length:.3f}" for length in lengths))


rex = steps_of(REXScheduler, total_steps=10, max_lr=1.0)
expected = [(1 - step / 10) / (1 - step / 20) for step in range(10)]
cosine = steps_of(
    CosineAnnealingWarmupRestarts, first_cycle_steps=5, max_lr=1.0, min_lr=0.0, gamma=1.0
)
expected_cosine = steps_of(CosineAnnealingWarmRestarts, T_0=5)
print("how far each of ten steps goes:")
show("REX as published", expected)
show("REXScheduler", rex)
show("torch's cosine with restarts", expected_cosine)
show("CosineAnnealingWarmupRestarts", cosine)


def differs_at(lengths, of):
    pairs = enumerate(zip(lengths, of, strict=True))
    return [step for step, (length, other) in pairs if abs(length - other) > 1e-9]


is_as_described = rex[0] == 0 and differs_at(rex, expected) == [0]
is_as_described &= cosine[0] == 0 and differs_at(cosine, expected_cosine) == [0]
sys.exit(0 if is_as_described else "a schedule now starts at its maximum")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
