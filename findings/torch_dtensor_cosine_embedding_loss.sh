#!/usr/bin/env bash
# torch 2.13.0: F.cosine_embedding_loss of DTensors that are sharded in the dimension of the vectors
# over P ranks is P - 1 too large for each pair that is to be similar; the gradient is right. (1 - x
# inside C++ fills a tensor with 1, and fill_ of a DTensor that is a partial sum fills the part of
# each rank, so that they sum to P.) No error, no warning; sharded by pair it is right.
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
from torch.nn.functional import cosine_embedding_loss, cosine_similarity

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
first, second = torch.randn(2, 4, 6, dtype=torch.float64)
labels = torch.tensor([1, 1, -1, -1])  # the first two pairs are to be similar


def loss_of(placement):
    """Return the loss of each pair and the gradient of their mean."""
    x, y, target = first.clone(), second, labels
    if placement is not None:
        x, y = (distribute_tensor(vectors, mesh, [placement]) for vectors in (x, y))
        target = distribute_tensor(target, mesh, [Replicate()])
    x.requires_grad_()
    losses = cosine_embedding_loss(x, y, target, reduction="none")
    losses.mean().backward()
    if placement is None:
        return losses, x.grad
    return losses.full_tensor(), x.grad.full_tensor()


similarity = cosine_similarity(first, second)
oracle = torch.where(labels == 1, 1 - similarity, similarity.clamp(min=0))
is_as_described = True
for name, placement in {"tensor": None, "by pair": Shard(0), "by dimension": Shard(1)}.items():
    losses, gradient = loss_of(placement)
    if dist.get_rank() == 0:
        print(f"{name:13}", [round(loss, 4) for loss in losses.tolist()])
    excess = torch.tensor([1.0, 1.0, 0.0, 0.0]) if name == "by dimension" else torch.zeros(4)
    is_as_described &= torch.allclose(losses, oracle + excess)
    is_as_described &= torch.allclose(gradient, loss_of(None)[1])
# The cause: a partial sum, filled in place.
counts = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]).sum(0).fill_(1.0).full_tensor()
if dist.get_rank() == 0:
    print("partial sum after fill_(1.0):", counts.tolist())
is_as_described &= counts.tolist() == [2.0, 2.0, 2.0]
dist.destroy_process_group()
sys.exit(0 if is_as_described else "cosine_embedding_loss no longer adds 1 to similar pairs")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
