#!/usr/bin/env bash
# pytorch-metric-learning 2.9.0: DistributedLossWrapper computes the loss of the embeddings of all P
# ranks on each rank and multiplies it by P. So gradients of the model, which flow through a rank's
# own embeddings alone, are right once DistributedDataParallel has averaged them. But the weights
# that a loss has, as those of ArcFace, SoftTriple and ProxyAnchor, see the embeddings of all ranks
# on each: their gradient is P times that of one process, and with SGD so is their learning rate. No
# error, no warning; by the documentation gradients equal those of code that is not distributed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 pytorch-metric-learning==2.9.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
rows, inputs, embedding_size, classes = 24, 12, 8, 5
torch.manual_seed(0)
data = torch.randn(rows, inputs, dtype=torch.float64)
labels = torch.randint(classes, (rows,))


def gradients(make_loss, is_distributed):
    torch.manual_seed(1)
    model = torch.nn.Linear(inputs, embedding_size, dtype=torch.float64)
    loss = make_loss().double()
    if is_distributed:
        part = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
        run = DistributedDataParallel(model)
        run_loss = DistributedDataParallel(DistributedLossWrapper(loss))
        run_loss(run(data[part]), labels[part]).backward()
    else:
        loss(model(data), labels).backward()
    return model.weight.grad, next(loss.parameters()).grad


is_as_described = True
for name, make_loss in {
    "ArcFace": lambda: losses.ArcFaceLoss(classes, embedding_size),
    "NormalizedSoftmax": lambda: losses.NormalizedSoftmaxLoss(classes, embedding_size),
    "ProxyAnchor": lambda: losses.ProxyAnchorLoss(classes, embedding_size),
    "SoftTriple": lambda: losses.SoftTripleLoss(classes, embedding_size, centers_per_class=2),
}.items():
    model_alone, weights_alone = gradients(make_loss, False)
    model_ranks, weights_ranks = gradients(make_loss, True)
    model_ratio = (model_ranks.norm() / model_alone.norm()).item()
    weights_ratio = (weights_ranks.norm() / weights_alone.norm()).item()
    if rank == 0:
        print(f"{name}: norm of the gradient, {ranks} ranks / one process:", end=" ")
        print(f"model {model_ratio:.6f}, weights of the loss {weights_ratio:.6f}")
    is_as_described &= torch.allclose(model_ranks, model_alone)
    is_as_described &= torch.allclose(weights_ranks, ranks * weights_alone)
dist.destroy_process_group()
sys.exit(0 if is_as_described else "the gradient of the loss's weights is no longer P times it")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
