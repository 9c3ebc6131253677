#!/usr/bin/env bash
# torch 2.13.0: get_optimizer_state_dict and get_state_dict, of torch.distributed.checkpoint, make
# the state of an optimizer that has taken no step yet by a step with gradients of 0. So training
# goes otherwise after them, as after a checkpoint before training: the first step of AdamW is 0.744
# times as large, of SGD with dampening 0.9 0.1 times, of Rprop 0.00001 times. No error, no warning;
# optimizer.state_dict() changes nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

optimizers = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0),
    "SGD with dampening": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, dampening=0.9
    ),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
}


def steps(name, look):
    """Return how much smaller each of three steps with a gradient of 1 makes a weight."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = optimizers[name](model.parameters())
    look(model, optimizer)
    taken = []
    for _ in range(3):
        before = model.weight.item()
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        taken.append(before - model.weight.item())
    return taken


# Adam divides by 1 - beta ** steps, so with one step more by 0.19 and 0.001999, not 0.1 and 0.001.
adam = (0.1 / 0.19) / (0.001 / 0.001999) ** 0.5
ratios = {"AdamW": adam, "SGD with dampening": 0.1, "Rprop": 1e-5}
is_as_described = True
for name in optimizers:
    print(name)
    first_steps = []
    for way, look in {
        "not looked at": lambda model, optimizer: None,
        "optimizer.state_dict()": lambda model, optimizer: optimizer.state_dict(),
        "get_optimizer_state_dict": get_optimizer_state_dict,
    }.items():
        taken = steps(name, look)
        print(f"    {way:25} steps of", ", ".join(f"{step:.7f}" for step in taken))
        first_steps.append(taken[0])
    ratio = first_steps[2] / first_steps[0]
    is_as_described &= abs(first_steps[1] / first_steps[0] - 1) < 1e-3
    is_as_described &= abs(ratio / ratios[name] - 1) < 1e-3
sys.exit(0 if is_as_described else "get_optimizer_state_dict no longer changes the first step")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
