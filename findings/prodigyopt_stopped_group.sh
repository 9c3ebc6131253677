#!/usr/bin/env bash
# prodigyopt 1.1.2: of learning rates that differ between parameter groups, Prodigy only allows zero
# (to stop a group), but it updates such a group with the others' learning rate. A group that is
# stopped after some steps goes on along its last average of gradients, no longer renewed, with a
# step that never shrinks; one with zero from the start is shrunk by weight decay. No error, no
# warning. With torch.optim.AdamW both stand still.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 prodigyopt==1.1.2
cat > "$folder/program.py" <<'PROGRAM'
import contextlib
import io
import sys

import torch
from prodigyopt import Prodigy


def moves(kind, steps_before, steps_after, weight_decay):
    """Return how far the second group has moved at each step after its learning rate became 0."""
    torch.manual_seed(0)
    first, second = (torch.nn.Parameter(torch.randn(8)) for _ in range(2))
    with contextlib.redirect_stdout(io.StringIO()):
        groups = [{"params": [first]}, {"params": [second]}]
        optimizer = kind(groups, lr=1.0, weight_decay=weight_decay)
    for step in range(steps_before + steps_after):
        if step == steps_before:
            optimizer.param_groups[1]["lr"] = 0.0
            stopped_at = second.detach().clone()
            moved = []
        optimizer.zero_grad()
        loss = ((first - 3) ** 2).sum() + ((second - 3) ** 2).sum()
        loss.backward()
        optimizer.step()
        if step >= steps_before:
            moved.append((second.detach() - stopped_at).abs().max().item())
    return moved


found = {}
for steps_before, steps_after, weight_decay in ((100, 50, 0.0), (0, 150, 0.1)):
    print(f"learning rate 0 after {steps_before} steps, weight_decay={weight_decay}")
    for kind in (torch.optim.AdamW, Prodigy):
        moved = moves(kind, steps_before, steps_after, weight_decay)
        found[kind, steps_before] = moved
        numbers = " ".join(f"{distance:.4f}" for distance in moved[9::20])
        print(f"    {kind.__name__:8} its parameters have moved by {numbers}")
is_as_described = max(found[torch.optim.AdamW, 100] + found[torch.optim.AdamW, 0]) == 0
stopped = found[Prodigy, 100]
is_as_described &= stopped[0] > 1e-3 and stopped[-1] > 30 * stopped[0]
is_as_described &= found[Prodigy, 0][-1] > 0.1
sys.exit(0 if is_as_described else "a group with a learning rate of 0 now stands still")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
