#!/usr/bin/env bash
# torch 2.13.0: F.cross_entropy of DTensors split by token, with ignored labels, returns the
# average of the ranks' means, though ranks count different numbers of tokens (and have equally
# many). The gradients are those of the mean over all tokens, so not of the loss. No warning.
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
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
logits = torch.randn(8, 5)
labels = torch.randint(5, (8,))
labels[4:7] = -100  # rank 0 counts four tokens, rank 1 one


def loss_and_gradient(split):
    z = logits.clone().requires_grad_()
    if split:
        z = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
    y = distribute_tensor(labels, mesh, [Shard(0)]) if split else labels
    loss = F.cross_entropy(z, y)
    loss.backward()
    return (loss.full_tensor(), z.grad.full_tensor()) if split else (loss, z.grad)


whole, dwhole = loss_and_gradient(split=False)
split, dsplit = loss_and_gradient(split=True)
of_ranks = [F.cross_entropy(z, y) for z, y in zip(logits.split(4), labels.split(4))]
of_means = torch.stack(of_ranks).mean()
error = float((dsplit - dwhole).norm() / dwhole.norm())
if dist.get_rank() == 0:
    print(f"loss of whole tensors: {whole:.4f}")
    print(f"loss of DTensors: {split:.4f}, mean of the ranks' means: {of_means:.4f}")
    print(f"gradients differ by {error:.1e}")
is_of_means = abs(split - whole) > 0.01 and abs(split - of_means) < 1e-5
dist.destroy_process_group()
sys.exit(0 if is_of_means and error < 1e-5 else "the loss of DTensors is no longer that of means")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
