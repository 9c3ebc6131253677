#!/usr/bin/env bash
# torch 2.13.0: F.cross_entropy in loss_parallel() takes class weights, and takes ignored labels,
# but not both: the loss is right, then its backward looks up the weight of the label -100 and
# raises "index -100 is out of bounds". With all weights 1 too. Without weights, with an
# ignore_index that is a class, and without loss_parallel the gradient is right. The forward
# function replaces ignored labels before it looks up weights.
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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
logits = torch.randn(4, 6)
weight = torch.rand(6) + 0.5
ignored_is_no_class = torch.tensor([1, -100, 5, -100])
ignored_is_a_class = torch.tensor([1, 2, 5, 2])


def say(*words):
    if dist.get_rank() == 0:
        print(*words)


def compare(labels, ignore_index, weight):
    """Return whether the loss is right, and the error of its backward, or None."""
    expected_logits = logits.clone().requires_grad_()
    expected = F.cross_entropy(expected_logits, labels, weight, ignore_index=ignore_index)
    expected.backward()
    placed = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    error = None
    with loss_parallel():
        loss = F.cross_entropy(
            placed,
            distribute_tensor(labels, mesh, [Replicate()]),
            None if weight is None else distribute_tensor(weight, mesh, [Replicate()]),
            ignore_index=ignore_index,
        )
        is_right = torch.allclose(loss.full_tensor(), expected)
        try:
            loss.backward()
        except RuntimeError as raised:
            error = str(raised)
    if error is None:
        is_right &= torch.allclose(placed.grad.full_tensor(), expected_logits.grad)
    return is_right, error


say("torch", torch.__version__)
is_as_described = True
for labels, ignore_index in ((ignored_is_no_class, -100), (ignored_is_a_class, 2)):
    for name, class_weight in (("no", None), ("random", weight), ("equal", torch.ones(6))):
        is_right, error = compare(labels, ignore_index, class_weight)
        say(f"labels {labels.tolist()}, ignore_index={ignore_index}, {name} weights:")
        say(f"    right where computed: {is_right}; backward: {error or 'computed'}")
        is_as_described &= is_right
        if ignore_index == -100 and class_weight is not None:
            is_as_described &= error is not None and "index -100 is out of bounds" in error
        else:
            is_as_described &= error is None
dist.destroy_process_group()
sys.exit(0 if is_as_described else "loss_parallel() now takes weights and ignored labels")
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone \
    --nproc-per-node 2 "$folder/program.py"
