#!/usr/bin/env bash
# torch 2.13.0: a learning rate scheduler of a PostLocalSGDOptimizer does nothing any more after
# load_state_dict, as on resuming from a checkpoint. The optimizer inside gets new parameter groups,
# and the one that the scheduler holds keeps the old. get_last_lr() still reports what the scheduler
# meant. No error, no warning; SGD alone and ZeroRedundancyOptimizer with SGD go on as before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

dist.init_process_group("gloo")


def make_optimizer(name, parameters):
    if name == "ZeroRedundancyOptimizer":
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.SGD, lr=1.0)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    if name == "PostLocalSGDOptimizer":
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=4))
    return optimizer


def state_of(optimizer):
    """Return the optimizer's state dict on every rank."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return copy.deepcopy(optimizer.state_dict())
    optimizer.consolidate_state_dict(0)
    states = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(states)
    return states[0]


def steps(name, is_resumed):
    """Return the learning rates that the steps took, and the scheduler's last one."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = make_optimizer(name, [parameter])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    if is_resumed:
        optimizer.load_state_dict(state_of(optimizer))
    taken = []
    for _ in range(4):
        before = parameter.detach().clone()
        parameter.grad = torch.ones(2)  # so that SGD's step is the learning rate
        optimizer.step()
        scheduler.step()
        taken.append((before - parameter.detach())[0].item())
    return taken, scheduler.get_last_lr()[0]


is_as_described = True
for name in ("SGD", "ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"):
    for is_resumed in (False, True):
        taken, last = steps(name, is_resumed)
        if dist.get_rank() == 0:
            print(f"{name}, {'after load_state_dict' if is_resumed else 'new'}")
            print(f"    steps of {taken}, get_last_lr() then {last}")
        is_stuck = is_resumed and name == "PostLocalSGDOptimizer"
        is_as_described &= taken == ([1.0] * 4 if is_stuck else [1.0, 0.5, 0.25, 0.125])
        is_as_described &= last == 0.0625
dist.destroy_process_group()
sys.exit(0 if is_as_described else "the scheduler no longer loses hold of PostLocalSGDOptimizer")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
