#!/usr/bin/env bash
# pytorch-scheduler 0.2.2: WarmupScheduler ("Composable warmup wrapper for any LR scheduler": from 0
# to base_lr, then it "delegates to the wrapped base_scheduler") never reaches base_lr with most
# schedulers of torch. Their get_lr continues from the optimizer's current rate, that of the last
# warmup step: the rates of StepLR, ExponentialLR, LinearLR and PolynomialLR are at most
# 1 - 1/warmup_steps times their own, and 0 for good if warmup_steps is 1. Those of LambdaLR and of
# the package's schedulers are right. torch warns about calls of get_lr; nothing warns of the rates.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 pytorch-scheduler==0.2.2
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings
from importlib.metadata import version

import torch
from pytorch_scheduler import LinearDecayScheduler, WarmupScheduler
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, PolynomialLR, StepLR

warnings.simplefilter("ignore")  # of torch, about calls of get_lr
print("torch", torch.__version__, "pytorch-scheduler", version("pytorch-scheduler"))

schedules = {
    "StepLR": lambda optimizer: StepLR(optimizer, 10),
    "ExponentialLR": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "LinearLR": lambda optimizer: LinearLR(optimizer, 1.0, 0.1, 20),
    "PolynomialLR": lambda optimizer: PolynomialLR(optimizer, 20),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "LinearDecayScheduler": lambda optimizer: LinearDecayScheduler(optimizer, total_steps=20),
}


def rates(make_schedule, warmup_steps, steps=15):
    """Return the learning rate of each step after the warmup, of a base rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = make_schedule(optimizer)
    if warmup_steps > 0:
        schedule = WarmupScheduler(optimizer, schedule, warmup_steps)
    of_steps = []
    for _ in range(warmup_steps + steps):
        of_steps.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return torch.tensor(of_steps[warmup_steps:])


is_as_described = True
for name, make_schedule in schedules.items():
    alone = rates(make_schedule, 0)
    print(f"{name}: {[round(rate, 3) for rate in alone[:4].tolist()]} ... without warmup")
    for warmup_steps in (1, 2, 10):
        after = rates(make_schedule, warmup_steps)
        print(f"    {[round(rate, 3) for rate in after[:4].tolist()]} ... after {warmup_steps}")
        if name in ("LambdaLR", "LinearDecayScheduler"):
            is_as_described &= torch.allclose(after, alone)
        else:
            limit = (1 - 1 / warmup_steps) * alone
            is_as_described &= (after <= limit + 1e-6).all().item()
sys.exit(0 if is_as_described else "rates after the warmup now are those of the scheduler")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
