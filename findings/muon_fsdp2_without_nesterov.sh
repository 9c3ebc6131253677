#!/usr/bin/env bash
# muon-fsdp2 0.3.0: with nesterov=False, Muon overwrites its momentum with the update. The gradient
# of a DTensor parameter then is the momentum buffer itself, and the orthogonalized, scaled update
# is written into it, so the next step's momentum is 0.95 of the last update. Weights go elsewhere
# than with the momentum of the code it names (KellerJordan/Muon): old updates outweigh gradients.
# Shown on a mesh of one rank; two ranks do the same. With nesterov=True the momentum is right. No
# error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-deps muon-fsdp2==0.3.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import torch
import torch.distributed as dist
from muon_fsdp2 import Muon, zeropower_via_newtonschulz5
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

print("torch", torch.__version__, "muon-fsdp2", version("muon-fsdp2"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
learning_rate, momentum = 0.1, 0.95

is_as_described = True
for nesterov in (True, False):
    torch.manual_seed(0)
    weight = torch.randn(8, 6)
    expected = weight.clone()
    buffer = torch.zeros(8, 6)  # the momentum as it should be
    parameter = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    group = dict(params=[parameter], lr=learning_rate, momentum=momentum, use_muon=True)
    optimizer = Muon([dict(group, nesterov=nesterov, rms_scale=False)])
    print(f"nesterov={nesterov}")
    for step in range(4):
        gradient = torch.randn(8, 6)
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if nesterov else buffer
        orthogonalized = zeropower_via_newtonschulz5(update, 5).float()
        expected -= learning_rate * max(1, 8 / 6) ** 0.5 * orthogonalized
        of_optimizer = optimizer.state[parameter]["momentum_buffer"].full_tensor()
        momentum_error = ((of_optimizer - buffer).norm() / buffer.norm()).item()
        error = (parameter.detach().full_tensor() - expected).norm().item()
        print(f"    step {step}: momentum off by {momentum_error:.1%}, weights by {error:.3f}")
        if nesterov:
            is_as_described &= momentum_error < 1e-5 and error < 1e-2
        else:
            is_as_described &= momentum_error > 1
    if not nesterov:
        is_as_described &= error > 0.1
dist.destroy_process_group()
sys.exit(0 if is_as_described else "nesterov=False now keeps the momentum")
PROGRAM
TORCHDYNAMO_DISABLE=1 "$folder/venv/bin/python" "$folder/program.py"
