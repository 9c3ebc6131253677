#!/usr/bin/env bash
# torch 2.13.0: torch.optim.Adafactor on vectors (biases, norms) that fully_shard has sharded scales
# the step of each rank's part by that part's norm, where without sharding it is that of the whole.
# So parts of one bias take steps of different sizes, all too small. No error, no warning; Adam is
# right, and Adafactor on a matrix sharded so raises an error.
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
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))


def step_of_bias(optimizer_class, is_sharded):
    """Return by how much one step makes each element of a layer's bias smaller."""
    layer = torch.nn.Linear(2, 8)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0]))
    before = layer.bias.detach().clone()
    layer.weight.requires_grad_(False)
    if is_sharded:
        fully_shard(layer, mesh=mesh)
    optimizer = optimizer_class([layer.bias], lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()  # the gradient of every element is 1
    optimizer.step()
    after = layer.bias.detach()
    return before - (after.full_tensor() if is_sharded else after)


is_as_described = True
for optimizer_class in (torch.optim.Adam, torch.optim.Adafactor):
    whole, sharded = (step_of_bias(optimizer_class, is_sharded) for is_sharded in (False, True))
    if dist.get_rank() == 0:
        print(optimizer_class.__name__)
        print("    whole:  ", [round(value, 3) for value in whole.tolist()])
        print("    sharded:", [round(value, 3) for value in sharded.tolist()])
    # The norm of the whole bias is 40 ** 0.5, those of the ranks' parts are 4 ** 0.5 and 36 ** 0.5.
    factor = torch.ones(8)
    if optimizer_class is torch.optim.Adafactor:
        factor = torch.tensor([4.0, 36.0]).div(40).sqrt().repeat_interleave(4)
    is_as_described &= torch.allclose(sharded, whole * factor, rtol=1e-3)
dist.destroy_process_group()
sys.exit(0 if is_as_described else "Adafactor no longer scales each rank's part by its own norm")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
