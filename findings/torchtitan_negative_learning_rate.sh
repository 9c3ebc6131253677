#!/usr/bin/env bash
# torchtitan 0.3.0: lr_scheduler.total_steps decouples the schedule from the steps of training, and
# min_lr_factor is "to ensure the learning rate does not drop below" that part of it. Neither holds
# where training goes on after total_steps: the linear and the square root decay go on through the
# minimum to negative rates, in time larger than the peak, so that the optimizer climbs and undoes
# the training; cosine comes back to the peak. No error, no warning; until total_steps all
# are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchtitan==0.3.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

PEAK, MINIMUM, TOTAL_STEPS, TRAINING_STEPS = 0.01, 0.1, 100, 200
is_as_described = True
for decay_type in ("linear", "sqrt", "cosine"):
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    targets = inputs @ torch.randn(8, 1)
    layer = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=PEAK, momentum=0.9)
    scheduler = LRSchedulersContainer.Config(
        warmup_steps=10,
        total_steps=TOTAL_STEPS,
        min_lr_factor=MINIMUM,
        decay_type=decay_type,
    ).build(optimizers=[optimizer], training_steps=TRAINING_STEPS)
    rates, losses = [], []
    for _ in range(TRAINING_STEPS):
        loss = torch.nn.functional.mse_loss(layer(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    print(f"{decay_type}, peak {PEAK}, minimum {MINIMUM * PEAK:g}:", end=" ")
    for step in (10, TOTAL_STEPS, TOTAL_STEPS + 50, TRAINING_STEPS):
        print(f"step {step} {rates[step - 1]:.4f}, loss {losses[step - 1]:.2g}", end="; ")
    print()
    is_as_described &= min(rates[9:TOTAL_STEPS]) >= MINIMUM * PEAK - 1e-9
    is_as_described &= losses[TOTAL_STEPS - 1] < 1e-2 * losses[0]
    if decay_type == "cosine":
        is_as_described &= max(rates[TOTAL_STEPS:]) > 0.99 * PEAK
    else:
        is_as_described &= rates[-1] < -0.2 * PEAK and losses[-1] > 10 * losses[TOTAL_STEPS - 1]
sys.exit(0 if is_as_described else "rates after total_steps are no longer below the minimum")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
