#!/usr/bin/env bash
# torch 2.13.0: a PowerSGDState, saved and loaded with a checkpoint as its documentation shows, has
# each bucket's error of compression and its low-rank factors. DistributedDataParallel orders the
# parameters in a bucket anew after its first iteration, by when their gradients were ready. So in
# the first iteration after resuming the state is that of another order: the error of one layer is
# added to the gradient of another, and each gradient may be off by more than its own size. No
# error, no warning of it. (For the same reason the documentation wants start_powerSGD_iter to be 2
# or more, but the count in a loaded state is past that.) A model whose layers are registered from
# last to first, so that their order stays, goes on as without a stop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import copy
import io
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
size, done, steps = 16, 6, 9
generator = torch.Generator().manual_seed(rank)
inputs = torch.randn(steps, 8, size, generator=generator, dtype=torch.float64)


class Model(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(size, size, bias=False, dtype=torch.float64))

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def make(names, state):
    model = DistributedDataParallel(Model(names))
    model.register_comm_hook(state, powerSGD_hook)
    return model


def train(model, first, last):
    """Return the gradients of each layer in each step, in the order of the layers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradients = []
    for x in inputs[first:last]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        layers = [model.module.first, model.module.middle, model.module.last]
        gradients.append([layer.weight.grad.clone() for layer in layers])
    return gradients


def compare():
    is_as_described = True
    for order, names in {
        "last to first": ("last", "middle", "first"),
        "first to last": ("first", "middle", "last"),
    }.items():
        torch.manual_seed(0)
        state = PowerSGDState(
            process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        model = make(names, state)
        train(model, 0, done)
        file = io.BytesIO()  # One for each rank, as errors are a rank's own.
        torch.save(state, file)
        weights = copy.deepcopy(model.state_dict())
        expected = train(model, done, steps)

        file.seek(0)
        resumed = make(names, torch.load(file, weights_only=False))
        resumed.load_state_dict(weights)
        got = train(resumed, done, steps)
        off = [
            [((a - b).norm() / b.norm()).item() for a, b in zip(*pair, strict=True)]
            for pair in zip(got, expected, strict=True)
        ]
        if rank == 0:
            print(f"layers registered from {order}; each layer's gradient after resuming, relative")
            print("to that without a stop, is off by")
            for step, numbers in enumerate(off, done):
                print(f"    step {step}:", ", ".join(f"{number:.1%}" for number in numbers))
        if order == "last to first":
            is_as_described &= max(map(max, off)) < 1e-9
        else:
            is_as_described &= off[0][0] > 0.5 and off[0][2] > 0.5 and max(off[1]) > 0.1
    return is_as_described


is_as_described = compare()
dist.barrier()
if not is_as_described:
    print("a resumed PowerSGDState no longer mixes up layers")
sys.stdout.flush()
os._exit(0 if is_as_described else 1)  # A usual exit sometimes aborts, once all is done.
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
