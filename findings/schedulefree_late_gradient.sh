#!/usr/bin/env bash
# schedulefree 1.4.1: AdamWScheduleFree and RAdamScheduleFree count the steps of a parameter group,
# but begin a parameter's averages at its first gradient. If that comes late (a parameter that was
# unfrozen, or an expert without tokens until then), it is corrected for a bias that it does not
# have: the first step of z is up to 1 / sqrt(1 - beta2), 32 by default, times the learning rate,
# and the next ones are too long as well. torch's AdamW and RAdam count each parameter's steps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 schedulefree==1.4.1
cat > "$folder/program.py" <<'PROGRAM'
import contextlib
import io
import sys

import torch
from schedulefree import AdamWScheduleFree, RAdamScheduleFree

LEARNING_RATE = 1e-3


def late_steps(kind, late_by, **options):
    """Return the steps at a parameter's first 8 gradients, all of them 1, in learning rates."""
    torch.manual_seed(0)
    early, late = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    optimizer = kind([early, late], lr=LEARNING_RATE, **options)
    if hasattr(optimizer, "train"):
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer.train()
    for _ in range(late_by):
        early.grad = torch.randn(4)
        optimizer.step()
        optimizer.zero_grad()
    walked = []
    for _ in range(8):
        position = optimizer.state[late].get("z", late).detach().clone()
        early.grad, late.grad = torch.randn(4), torch.ones(4)
        optimizer.step()
        moved = optimizer.state[late].get("z", late).detach() - position
        walked.append(moved.abs().max().item() / LEARNING_RATE)
        optimizer.zero_grad()
    return walked


found = {}
for kind, options in (
    (torch.optim.AdamW, {"weight_decay": 0.0}),
    (AdamWScheduleFree, {}),
    (torch.optim.RAdam, {}),
    (RAdamScheduleFree, {}),
):
    for late_by in (0, 10_000):
        walked = late_steps(kind, late_by, **options)
        found[kind, late_by] = walked
        numbers = " ".join(f"{step:6.2f}" for step in walked)
        print(f"{kind.__name__:18} from step {late_by:5}: steps of {numbers} learning rates")
is_as_described = max(found[torch.optim.AdamW, 10_000]) < 1.01
is_as_described &= max(found[AdamWScheduleFree, 0][1:]) < 1.01
is_as_described &= max(found[torch.optim.RAdam, 10_000]) < 1.01
is_as_described &= max(found[RAdamScheduleFree, 0]) < 1.01
for kind in (AdamWScheduleFree, RAdamScheduleFree):
    is_as_described &= 30 < found[kind, 10_000][1] + found[kind, 10_000][0]
    is_as_described &= min(found[kind, 10_000][2:]) > 5
sys.exit(0 if is_as_described else "late parameters no longer begin with such steps")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
