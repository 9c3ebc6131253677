#!/usr/bin/env bash
# torch 2.13.0: F.embedding with scale_grad_by_freq=True divides a row's gradient by how often its
# id occurs in the batch. Of ids that are DTensors sharded over ranks each rank counts its own part,
# and the sum of what ranks divided by these numbers is the gradient: of an id that occurs once on
# each of two ranks it is twice as large as that of the same ids on one. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
ids = torch.tensor([[0, 1, 1], [1, 2, 0]])  # a row of each rank; id 2 occurs on one
table = torch.arange(6.0).view(3, 2)


def gradient(table, ids, scale_grad_by_freq):
    table = table.requires_grad_()
    F.embedding(ids, table, scale_grad_by_freq=scale_grad_by_freq).sum().backward()
    return table.grad


is_as_described = True
for scales in (False, True):
    expected = gradient(table.clone(), ids, scales)
    found = []
    for placement in (Replicate(), Shard(0)):
        whole = distribute_tensor(table.clone(), mesh, [Replicate()])
        spread = distribute_tensor(ids, mesh, [placement])
        found.append(gradient(whole, spread, scales).full_tensor())
    if mesh.get_rank() == 0:
        print(f"scale_grad_by_freq={scales}, gradients of rows 0, 1 and 2")
        for name, x in zip(("one process", "ids replicated", "ids sharded"), (expected, *found)):
            print(f"    {name:16s}", x[:, 0].tolist())
    is_as_described &= torch.equal(found[0], expected)
    is_as_described &= torch.equal(found[1], expected) != scales
    if scales:
        is_as_described &= found[1][:, 0].tolist() == [2.0, 2.0, 1.0]
dist.destroy_process_group()
sys.exit(0 if is_as_described else "frequencies of sharded ids are no longer those of each part")
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone \
    --nproc-per-node 2 "$folder/program.py"
