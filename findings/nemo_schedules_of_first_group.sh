#!/usr/bin/env bash
# nemo-toolkit 3.0.0: CosineAnnealing with constant_steps, and WarmupAnnealing once it has warmed
# up, give all parameter groups the schedule of the first one. So learning rates of modules, which
# optim_param_groups promises, are lost: a group of 0.0001 trains with 0.01. No error, no warning;
# CosineAnnealing without constant_steps and PolynomialDecayAnnealing keep them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 "nemo-toolkit[core]==3.0.0"
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

warnings.filterwarnings("ignore")

import torch
from nemo.core.optim.lr_scheduler import (
    CosineAnnealing,
    PolynomialDecayAnnealing,
    WarmupAnnealing,
)


def learning_rates(cls, options):
    """Return the learning rates of two groups at each of 100 steps."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.01},
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0001},
    ]
    optimizer = torch.optim.SGD(groups)
    scheduler = cls(optimizer, max_steps=100, warmup_steps=10, **options)
    rates = []
    for _ in range(100):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


is_as_described = True
for cls, options, is_lost_at in (
    (CosineAnnealing, {}, []),
    (PolynomialDecayAnnealing, {}, []),
    (CosineAnnealing, {"constant_steps": 10}, [5, 10, 11, 50]),
    (WarmupAnnealing, {}, [11, 50]),
):
    rates = learning_rates(cls, options)
    print(f"{cls.__name__} of 100 steps, 10 of warmup, {options}: groups of 0.01 and 0.0001")
    for step in (5, 10, 11, 50):
        first, second = rates[step]
        print(f"    step {step:2}: {first:.6f} and {second:.6f}")
        expected = first if step in is_lost_at else first / 100
        is_as_described &= abs(second - expected) < 1e-9
sys.exit(0 if is_as_described else "each group has a schedule of its own")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
