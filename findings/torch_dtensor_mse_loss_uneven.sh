#!/usr/bin/env bash
# torch 2.13.0: F.mse_loss (as huber_loss and smooth_l1_loss) of DTensors whose shards have
# different sizes is the mean of the shards' means, not the mean of all elements. The mean of the
# same squares by x.square().mean() is right. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
whole = torch.tensor([0.0, 0.0, 3.0])  # two elements on rank 0, one on rank 1
x = distribute_tensor(whole, mesh, [Shard(0)])
target = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])
expected = F.mse_loss(whole, torch.zeros(3)).item()
loss = F.mse_loss(x, target).full_tensor().item()
mean = (x - target).square().mean().full_tensor().item()
if dist.get_rank() == 0:
    print("expected:", expected)
    print("mse_loss:", loss)
    print("mean of squares:", mean)
is_as_described = expected == mean == 3.0 and loss == 4.5
dist.destroy_process_group()
sys.exit(0 if is_as_described else "mse_loss of uneven shards is no longer a mean of means")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
