#!/usr/bin/env bash
# torch 2.13.0: F.conv1d of DTensors whose weight is sharded over its output channels, as
# distribute_tensor does for tensor parallelism, returns a DTensor that says that it is replicated,
# of the right shape. But each rank holds only its own channels: full_tensor() gives rank 0 half of
# them and rank 1 the other half. No error, no warning; F.linear of such a weight is right.
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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import conv1d, linear

mesh = init_device_mesh("cpu", (2,))
rank = dist.get_rank()
torch.manual_seed(0)
frames = torch.randn(1, 3, 5, dtype=torch.float64)  # sequence, channel, time
weight = torch.randn(4, 3, 1, dtype=torch.float64)  # a convolution of width 1 is a linear layer


def apply(function, inputs, matrix):
    inputs = distribute_tensor(inputs, mesh, [Replicate()])
    output = function(inputs, distribute_tensor(matrix, mesh, [Shard(0)]))
    return output, output.full_tensor()


expected = conv1d(frames, weight)
is_as_described = True
for name, (output, whole) in {
    "linear": apply(linear, frames.transpose(1, 2), weight[:, :, 0]),
    "conv1d": apply(conv1d, frames, weight),
}.items():
    right = expected.transpose(1, 2) if name == "linear" else expected
    first = [None, None]
    dist.all_gather_object(first, (tuple(whole.shape), round(whole.flatten()[0].item(), 3)))
    if rank == 0:
        print(f"{name}: the output is {tuple(output.shape)}, {output.placements}")
        print(f"    oracle: {tuple(right.shape)}, first number {right.flatten()[0]:.3f}")
        for of_rank, (shape, number) in enumerate(first):
            print(f"    full_tensor() of rank {of_rank}: {shape}, first number {number}")
    if name == "conv1d":
        right = expected[:, 2 * rank : 2 * rank + 2]
        is_as_described &= tuple(output.shape) == (1, 4, 5) and output.placements == (Replicate(),)
    is_as_described &= whole.shape == right.shape and torch.allclose(whole, right)
dist.destroy_process_group()
sys.exit(0 if is_as_described else "conv1d no longer returns each rank's channels as all of them")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
