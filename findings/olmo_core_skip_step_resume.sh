#!/usr/bin/env bash
# ai2-olmo-core 3.0.0: the last losses and gradient norms by which SkipStepAdamW and SkipStepLion
# decide are not in their state_dict. After a resume nothing is skipped until half of
# rolling_interval_length (64 of 128 steps by default) has passed, and later with other thresholds:
# an outlier that an uninterrupted run skips is applied. No error, no warning. The optimizer that
# the same library has for MoE models keeps both lists in its checkpoints.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 ai2-olmo-core==3.0.0
cat > "$folder/program.py" <<'PROGRAM'
import io
import sys

import torch
from olmo_core.optim import SkipStepAdamW, SkipStepLion

steps, bad_step = 200, 150
gradients = torch.randn(steps, 4, generator=torch.Generator().manual_seed(0))
gradients[bad_step] *= 1000
losses = 2 + 0.1 * torch.rand(steps, generator=torch.Generator().manual_seed(1))


def make(cls):
    parameter = torch.nn.Parameter(torch.ones(4))
    return parameter, cls([parameter], lr=0.001)


def train(parameter, optimizer, first, last):
    skipped = []
    for step in range(first, last):
        parameter.grad = gradients[step].clone()
        optimizer.latest_loss = losses[step]
        optimizer.latest_grad_norm = parameter.grad.norm()
        optimizer.step()
        if optimizer.step_skipped.item() == 1:
            skipped.append(step)
    return skipped


def resumed(cls, stop):
    """Return the parameter and skipped steps of a run that is saved and resumed at the stop."""
    parameter, optimizer = make(cls)
    skipped = train(parameter, optimizer, 0, stop)
    file = io.BytesIO()
    torch.save({"parameter": parameter.data, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    parameter, optimizer = make(cls)
    parameter.data.copy_(saved["parameter"])
    optimizer.load_state_dict(saved["optimizer"])
    return parameter, skipped + train(parameter, optimizer, stop, steps)


is_as_described = True
for cls in (SkipStepAdamW, SkipStepLion):
    parameter, optimizer = make(cls)
    skipped = train(parameter, optimizer, 0, steps)
    print(f"{cls.__name__}, {steps} steps, whose gradient is 1000 times as large at {bad_step}")
    print(f"    not interrupted:  skipped {skipped}")
    is_as_described &= skipped == [bad_step]
    for stop in (40, 100, 145):
        other, skipped = resumed(cls, stop)
        distance = (parameter - other).abs().max().item()
        print(f"    resumed at {stop:3}:   skipped {skipped}, parameters {distance:.6f} away")
        if stop == 40:  # 110 steps are enough to decide again
            is_as_described &= skipped == [bad_step] and distance == 0
        else:
            is_as_described &= skipped == [] and distance > 1e-4
sys.exit(0 if is_as_described else "a resumed optimizer now decides as one that goes on")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
