#!/usr/bin/env bash
# torch 2.13.0: amax() and amin() of a sharded DTensor, over all dimensions, are right, but their
# gradient is infinite at the extreme and NaN elsewhere. Where both ranks hold the extreme each
# counts it in full, so that the gradient sums to 2. max() and amax(0) are right. No error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
extremes = {
    "amax()": lambda x: x.amax(),
    "amin()": lambda x: x.neg().amin().neg(),
    "amax(0)": lambda x: x.amax(0),
    "max()": lambda x: x.max(),
}


def gradients(numbers):
    """Return what each gives: its value, and its gradient."""
    found = {}
    for name, extreme in extremes.items():
        x = distribute_tensor(torch.tensor(numbers), mesh, [Shard(0)]).requires_grad_()
        value = extreme(x).full_tensor()
        value.backward()
        found[name] = x.grad.full_tensor()
        if dist.get_rank() == 0:
            print(f"    {name:8} {value.item()}, gradient {found[name].tolist()}")
    return found


def show(text):
    if dist.get_rank() == 0:
        print(text)


show("of 1, 2 on rank 0 and 4, 3 on rank 1:")
one = gradients([1.0, 2.0, 4.0, 3.0])
show("of 1, 4 on rank 0 and 4, 3 on rank 1:")
both = gradients([1.0, 4.0, 4.0, 3.0])
is_as_described = True
for name in extremes:
    if name in ("amax(0)", "max()"):
        is_as_described &= one[name].tolist() == [0, 0, 1, 0]
        is_as_described &= both[name].tolist() == [0, 0.5, 0.5, 0]
    else:
        is_as_described &= one[name].isnan().tolist() == [True, True, False, True]
        is_as_described &= one[name][2].isinf().item()
        is_as_described &= both[name].tolist() == [0, 1, 1, 0]
dist.destroy_process_group()
sys.exit(0 if is_as_described else "the gradient of amax() or amin() has changed")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
