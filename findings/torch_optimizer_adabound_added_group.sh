#!/usr/bin/env bash
# torch-optimizer 0.3.0: AdaBound never trains a group of parameters that add_param_group brings in
# later, as when layers are unfrozen after some steps (what torch.optim documents the method for).
# step pairs the groups with the learning rates that it noted when it was made, and stops at the end
# of the shorter list. No error, no warning; a scheduler goes on changing the group's learning rate.
# AdaMod of the same package trains it, and so do torch.optim's optimizers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torch-optimizer==0.3.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch
import torch_optimizer

warnings.simplefilter("ignore")
torch.manual_seed(0)
inputs, targets = torch.randn(256, 8), torch.randn(256, 1)


def train(kind, add_later):
    """Return the loss before and after 200 steps, and how far the first layer has moved."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    first, last = list(model[0].parameters()), list(model[2].parameters())
    if add_later:
        optimizer = kind(last, lr=0.01)
        optimizer.add_param_group({"params": first})
    else:
        optimizer = kind([{"params": last}, {"params": first}], lr=0.01)
    weight = first[0].detach().clone()
    losses = []
    for _ in range(200):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1], (first[0] - weight).abs().max().item()


is_as_described = True
for kind in (torch.optim.Adam, torch_optimizer.AdaMod, torch_optimizer.AdaBound):
    print(f"{kind.__module__}.{kind.__name__}")
    results = {}
    for add_later in (False, True):
        before, after, moved = results[add_later] = train(kind, add_later)
        name = "add_param_group" if add_later else "the constructor"
        print(f"    first layer by {name}: loss {before:.4f} -> {after:.4f},", end=" ")
        print(f"its weight has moved by {moved:.4f}")
    if kind is torch_optimizer.AdaBound:
        is_as_described &= results[True][2] == 0 and results[False][2] > 0.05
        is_as_described &= results[True][1] > 1.2 * results[False][1]
    else:
        is_as_described &= results[True] == results[False] and results[True][2] > 0.05
sys.exit(0 if is_as_described else "AdaBound now trains a group that was added")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
