#!/usr/bin/env bash
# torch 2.13.0: cumsum(-1) of a DTensor that is sharded in its last dimension sums within each shard
# alone, and so do cumprod and logcumsumexp. The same dimension counted from the front, cumsum(1),
# is right. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
whole = torch.ones(2, 4)
sharded = distribute_tensor(whole, mesh, [Shard(1)])
from_front = sharded.cumsum(1).full_tensor()
from_back = sharded.cumsum(-1).full_tensor()
if dist.get_rank() == 0:
    print("expected:  ", whole.cumsum(1)[0].tolist())
    print("cumsum(1): ", from_front[0].tolist())
    print("cumsum(-1):", from_back[0].tolist())
within_shards = torch.tensor([1.0, 2.0, 1.0, 2.0]).expand(2, 4)
is_as_described = from_front.equal(whole.cumsum(1)) and from_back.equal(within_shards)
dist.destroy_process_group()
sys.exit(0 if is_as_described else "cumsum(-1) no longer stops at the shards' ends")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
