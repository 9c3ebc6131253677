#!/usr/bin/env bash
# nemo-toolkit 3.0.0: schedules with warmup, hold and annealing anneal from step 0 if they get no
# hold_steps, not from the end of warmup. So the learning rate drops in one step after warmup, where
# WarmupHoldAnnealLinear and WarmupHoldAnnealOneMinusSquareRoot say that they decrease from base_lr:
# to 0.49 and 0.29 of it with 50 steps of warmup of 100, and PolynomialHoldDecayAnnealing stays at 0
# for the rest of the training. No error, no warning; with hold_steps=1 all three are right.
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
    PolynomialHoldDecayAnnealing,
    WarmupHoldAnnealLinear,
    WarmupHoldAnnealOneMinusSquareRoot,
)


def learning_rates(cls, options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = cls(optimizer, max_steps=100, warmup_steps=50, **options)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


steps = (49, 50, 51, 52, 60, 75, 99)
print(f"learning rate at steps {steps} of 100, of which 50 warm up to 1")
is_as_described = True
for cls, expected in (
    (WarmupHoldAnnealLinear, 0.49),
    (WarmupHoldAnnealOneMinusSquareRoot, 1 - 0.51**0.5),
    (PolynomialHoldDecayAnnealing, 0),
):
    for options in ({"hold_steps": 1}, {}):
        rates = learning_rates(cls, options)
        shown = [f"{rates[step]:.3f}" for step in steps]
        print(f"    {cls.__name__}, {options}: {', '.join(shown)}")
        is_as_described &= rates[50] == 1
        is_as_described &= abs(rates[51] - (expected if options == {} else 1)) < 1e-6
        if cls is PolynomialHoldDecayAnnealing:
            is_as_described &= (rates[51:] == [0] * 49) == (options == {})
sys.exit(0 if is_as_described else "annealing starts from the learning rate of warmup")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
