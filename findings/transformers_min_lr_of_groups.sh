#!/usr/bin/env bash
# transformers 5.24.0: cosine_with_min_lr decreases the learning rate "to min_lr", by its docstring,
# "the minimum learning rate to reach". It divides min_lr by the optimizer's default learning rate,
# and multiplies the quotient with each group's own. So a group ends at min_lr only if its rate is
# that default: groups of 1e-5 and 1e-4, of an optimizer whose own lr was left at AdamW's 1e-3, end
# at 1e-8 and 1e-7 instead of 1e-6; others end above the minimum. cosine_warmup_with_min_lr is the
# same. No error, no warning; torch's CosineAnnealingLR takes every group to eta_min.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 transformers==5.24.0
cat > "$folder/program.py" <<'PROGRAM'
import math
import sys

import torch
from transformers import get_scheduler

STEPS, MIN_LR = 1000, 1e-6


def last_rates(schedule, **options):
    """Return the learning rates of two groups, of 1e-5 and 1e-4, after all steps."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1e-5, 1e-4)]
    optimizer = torch.optim.AdamW(groups, **options)
    if schedule == "torch":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=MIN_LR)
    else:
        scheduler = get_scheduler(
            schedule, optimizer, 0, STEPS, scheduler_specific_kwargs={"min_lr": MIN_LR}
        )
    for _ in range(STEPS - 1):
        optimizer.step()
        scheduler.step()
    return scheduler.get_last_lr()


is_as_described = True
for schedule in ("torch", "cosine_with_min_lr", "cosine_warmup_with_min_lr"):
    for options in ({}, {"lr": 1e-5}):
        rates = last_rates(schedule, **options)
        print(f"{schedule}, optimizer's own lr {options.get('lr', 1e-3)}:", end=" ")
        print(", ".join(f"{lr:.3g}" for lr in rates), "at the end")
        for lr, rate in zip((1e-5, 1e-4), rates):
            reached = MIN_LR if schedule == "torch" else MIN_LR * lr / options.get("lr", 1e-3)
            is_as_described &= math.isclose(rate, reached, rel_tol=0.05)
sys.exit(0 if is_as_described else "the groups now end at min_lr")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
