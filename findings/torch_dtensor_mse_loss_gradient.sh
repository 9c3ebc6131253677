#!/usr/bin/env bash
# torch 2.13.0: the gradients of F.mse_loss, F.smooth_l1_loss and F.huber_loss of DTensors that are
# sharded evenly over P ranks are P times too large; the losses themselves are right. Those of
# F.l1_loss, of the same functions with reduction="sum", and of (x - y).square().mean() are right.
# F.soft_margin_loss behaves like mse_loss. No error, no warning.
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
from torch.distributed.tensor import Shard, distribute_tensor

P = 4
LOSSES = {
    "mse_loss": (F.mse_loss, P),
    "smooth_l1_loss": (F.smooth_l1_loss, P),
    "huber_loss": (F.huber_loss, P),
    "soft_margin_loss": (lambda x, y: F.soft_margin_loss(x, y.sign()), P),
    "l1_loss": (F.l1_loss, 1),
    "mse_loss, a sum": (lambda x, y: F.mse_loss(x, y, reduction="sum"), 1),
    "(x - y).square().mean()": (lambda x, y: (x - y).square().mean(), 1),
}


def rank_main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=P)
    mesh = init_device_mesh("cpu", (P,))
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, 3)
    is_as_described = True
    for name, (loss_of, times) in LOSSES.items():
        whole = x.clone().requires_grad_()
        expected = loss_of(whole, y)
        expected.backward()
        sharded = distribute_tensor(x.clone(), mesh, [Shard(0)]).requires_grad_()
        loss = loss_of(sharded, distribute_tensor(y.clone(), mesh, [Shard(0)]))
        loss.backward()
        value, gradient = loss.full_tensor(), sharded.grad.full_tensor()
        if rank == 0:
            ratio = (gradient.norm() / whole.grad.norm()).item()
            values = f"loss {value.item():8.4f} of {expected.item():8.4f}"
            print(f"{name:24s} {values}, gradient {ratio:.2f} times")
        is_as_described &= torch.allclose(value, expected)
        is_as_described &= torch.allclose(gradient, times * whole.grad, rtol=1e-4, atol=1e-6)
    dist.destroy_process_group()
    if not is_as_described:
        sys.exit(1)


if __name__ == "__main__":
    store = os.path.join(os.path.dirname(os.path.abspath(__file__)), "store")
    try:
        torch.multiprocessing.spawn(rank_main, (store,), P)
    except torch.multiprocessing.ProcessExitedException:
        sys.exit("losses or gradients of sharded tensors have changed")
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/program.py"
