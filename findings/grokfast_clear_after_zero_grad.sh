#!/usr/bin/env bash
# grokfast-pytorch 0.0.11: clear_grokfast_state of GrokFastAdamW does nothing where it is natural to
# call it, between steps: it passes over parameters without a gradient, and after zero_grad none has
# one. So after turn_off_grokfast and turn_on_grokfast the average of gradients from before goes on
# to be added, as if it had not been cleared. No error, no warning. Called before zero_grad it
# clears.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 grokfast-pytorch==0.0.11
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from grokfast_pytorch import GrokFastAdamW


def train(when):
    """Return averages kept after clearing, and the weight after 20 more steps of a new gradient."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = GrokFastAdamW([weight], lr=0.01, grokfast_lamb=5.0)
    for _ in range(50):
        weight.grad = torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
    weight.grad = torch.ones(3)
    optimizer.turn_off_grokfast()
    optimizer.step()
    if when == "before zero_grad":
        optimizer.clear_grokfast_state()
    optimizer.zero_grad()
    if when == "after zero_grad":
        optimizer.clear_grokfast_state()
    kept = sum("grok_exp_avg" in state for state in optimizer.state.values())
    optimizer.turn_on_grokfast()
    start = weight[0].item()
    for _ in range(20):
        weight.grad = -torch.ones(3)  # the other way, now
        optimizer.step()
        optimizer.zero_grad()
    return kept, weight[0].item() - start


found = {when: train(when) for when in ("never", "after zero_grad", "before zero_grad")}
for when, (kept, moved) in found.items():
    print(f"clear_grokfast_state {when}: {kept} averages kept;", end=" ")
    print(f"20 steps against the new gradient move the weight by {moved:.4f}")
is_as_described = found["never"] == found["after zero_grad"]
is_as_described &= found["before zero_grad"][0] == 0 and found["never"][0] == 1
is_as_described &= found["before zero_grad"][1] > found["never"][1] + 0.005
sys.exit(0 if is_as_described else "clear_grokfast_state now clears after zero_grad, too")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
