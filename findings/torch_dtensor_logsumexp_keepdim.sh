#!/usr/bin/env bash
# torch 2.13.0: logsumexp(1, keepdim=True) of a DTensor sharded in a later dimension, as of logits
# with the classes in dimension 1 that are split by position, says that it is sharded in dimension
# 1. full_tensor() then returns the values of rank 0 alone, here of 3 of 6 positions. No error, no
# warning; without keepdim, and over a later dimension than the sharded one, it is right.
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
torch.manual_seed(0)
logits = torch.randn(1, 10, 6, dtype=torch.float64)  # sequence, class, position
oracle = logits.exp().sum(1).log()[0]


def logsumexp(dim, keepdim):
    """Return it with the classes in dimension dim and positions in the other, split over ranks."""
    tensor = logits if dim == 1 else logits.transpose(1, 2).contiguous()
    tensor = distribute_tensor(tensor, mesh, [Shard(3 - dim)])
    result = tensor.logsumexp(dim, keepdim=keepdim)
    return result, result.full_tensor().flatten()


if dist.get_rank() == 0:
    print(f"{'oracle':18}", [round(value, 3) for value in oracle.tolist()])
is_as_described = True
for dim, keepdim in ((2, True), (1, False), (1, True)):
    result, whole = logsumexp(dim, keepdim)
    if dist.get_rank() == 0:
        name = f"({dim}, keepdim={keepdim})"
        print(f"{name:18}", [round(value, 3) for value in whole.tolist()])
        print(f"    {tuple(result.shape)}, {result.placements}, mean square", end=" ")
        print(f"{whole.square().mean():.3f} where it is {oracle.square().mean():.3f}")
    expected = oracle[:3] if (dim, keepdim) == (1, True) else oracle
    is_as_described &= torch.equal(whole.round(decimals=9), expected.round(decimals=9))
dist.destroy_process_group()
sys.exit(0 if is_as_described else "logsumexp with keepdim no longer loses positions")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
