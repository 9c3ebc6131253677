#!/usr/bin/env bash
# torch 2.13.0: context_parallel shards its buffers in place and restores them after its block. Of
# inputs and labels that are slices of the same tokens, batch[:, :-1] and batch[:, 1:], it writes
# each shard over memory that the other one, or the batch, still needs. So ranks train on wrong
# tokens, in the block as well as after it, where the batch has changed too. No error, no warning;
# of clones of the slices the shards are right, and all is as before after the block.
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
from torch.distributed.tensor.experimental import context_parallel

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))


def shards_of(inputs, labels):
    """Return the shards of inputs and of labels that each rank has in the block."""
    with context_parallel(mesh, buffers=[inputs, labels], buffer_seq_dims=[1, 1]):
        ranks = [None, None]
        dist.all_gather_object(ranks, (inputs.tolist(), labels.tolist()))
    return ranks


is_as_described = True
for rows in (1, 2):
    batch = torch.arange(10, 10 + rows * 9).reshape(rows, 9)
    tokens = batch.clone()
    expected = shards_of(tokens[:, :-1].clone(), tokens[:, 1:].clone())
    are_clones_right = torch.equal(tokens, batch)
    inputs = tokens[:, :-1]
    got = shards_of(inputs, tokens[:, 1:])
    is_batch_kept = torch.equal(tokens, batch)
    if rank == 0:
        print(f"batch {batch.tolist()}")
        for number in range(2):
            print(f"    inputs, labels of rank {number}, of clones: {expected[number]}")
            print(f"    inputs, labels of rank {number}, of slices: {got[number]}")
        print(f"    afterwards inputs {inputs.tolist()}, batch {tokens.tolist()}")
    is_as_described &= are_clones_right and got != expected
    # Slices of a batch of one row are contiguous, so that what is restored fits.
    is_as_described &= is_batch_kept == (rows == 1)
    is_as_described &= torch.equal(inputs, batch[:, :-1]) == (rows == 1)
dist.destroy_process_group()
sys.exit(0 if is_as_described else "context_parallel treats slices like their clones")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
