#!/usr/bin/env bash
# torchopt 0.7.3: whether SGD takes its first step stands in a variable of the optimizer's closure,
# not in its state. After load_state_dict in a new optimizer the first step keeps all of the saved
# momentum buffer in place of momentum times it, so a resumed run departs. Likewise a second init of
# one functional optimizer with dampening starts otherwise than the first, though its state is new.
# RMSProp with momentum departs, too. With torch.optim.SGD a resumed run is exact.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchopt==0.7.3
cat > "$folder/program.py" <<'PROGRAM'
import copy
import sys

import torch
import torchopt

torch.manual_seed(0)
start = torch.randn(8, dtype=torch.float64)
target = torch.randn(8, dtype=torch.float64)


def train(optimizer, parameter, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        torch.cosh(parameter - target).sum().backward()
        optimizer.step()
    return parameter.detach().clone()


def resumed_differs_by(kind, **options):
    parameter = torch.nn.Parameter(start.clone())
    optimizer = kind([parameter], lr=0.01, **options)
    stopped_at = train(optimizer, parameter, 10)
    state = copy.deepcopy(optimizer.state_dict())
    expected = train(optimizer, parameter, 10)
    parameter = torch.nn.Parameter(stopped_at)
    optimizer = kind([parameter], lr=0.01, **options)
    optimizer.load_state_dict(state)
    return (train(optimizer, parameter, 10) - expected).abs().max().item()


def first_steps_of_runs(**options):
    """Run one functional optimizer twice from the same parameter and a new state."""
    optimizer = torchopt.sgd(lr=1.0, **options)
    steps = []
    for _ in range(2):
        parameters = {"x": torch.zeros(1)}
        state = optimizer.init(parameters)
        gradients = {"x": torch.ones(1)}
        updates, state = optimizer.update(gradients, state, inplace=False)
        steps.append(updates["x"].item())
    return steps


print("largest difference of a run resumed after 10 of 20 steps:")
is_as_described = True
for kind, momentum in (
    (torch.optim.SGD, 0.9),
    (torchopt.SGD, 0.0),
    (torchopt.SGD, 0.9),
    (torchopt.RMSProp, 0.9),
):
    difference = resumed_differs_by(kind, momentum=momentum)
    print(f"    {kind.__module__.split('.')[0]:8} {kind.__name__:7}", end=" ")
    print(f"momentum={momentum}: {difference:.1e}")
    departs = kind is not torch.optim.SGD and momentum > 0
    is_as_described &= difference > 1e-3 if departs else difference == 0
steps = first_steps_of_runs(momentum=0.9, dampening=0.5)
print(f"first steps of two runs of sgd(momentum=0.9, dampening=0.5): {steps}")
is_as_described &= steps == [-1.0, -0.5]
sys.exit(0 if is_as_described else "torchopt's momentum is now resumed exactly")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
