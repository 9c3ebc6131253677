#!/usr/bin/env bash
# torch 2.13.0: gather(1, index) of a DTensor split by row, with an index of fewer rows, as for the
# log-probabilities of the first tokens, splits the index over the ranks as well. So from the second
# rank on it returns values of rows further down. The gradient is that of the right rows, so not of
# the result. No error, no warning; with an index of as many rows as the tensor all is right.
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

mesh = init_device_mesh("cpu", (2,))
scores = torch.arange(80.0).view(8, 10)  # the score of class 3 in row 2 is 23
labels = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])[:, None]


def of_first_rows(count):
    """Return the labels' scores in the first rows and the rows with a gradient, of both kinds."""
    results = []
    for is_distributed in (False, True):
        tensor, index = scores.clone(), labels[:count]
        if is_distributed:
            tensor = distribute_tensor(tensor, mesh, [Shard(0)])
            index = distribute_tensor(index, mesh, [Replicate()])
        tensor.requires_grad_()
        chosen = tensor.gather(1, index)
        chosen.sum().backward()
        gradient = tensor.grad
        if is_distributed:
            chosen, gradient = chosen.full_tensor(), gradient.full_tensor()
        results.append((chosen.flatten().tolist(), gradient.sum(1).nonzero().flatten().tolist()))
    return results


is_as_described = True
for count in (8, 4):
    plain, distributed = of_first_rows(count)
    if dist.get_rank() == 0:
        print(f"the labels' scores in the first {count} of 8 rows")
        print(f"    tensor:  {plain[0]}, gradient in rows {plain[1]}")
        print(f"    DTensor: {distributed[0]}, gradient in rows {distributed[1]}")
    expected = plain if count == 8 else ([3.0, 11.0, 44.0, 51.0], [0, 1, 2, 3])
    is_as_described &= distributed == expected
dist.destroy_process_group()
sys.exit(0 if is_as_described else "gather no longer returns values of rows further down")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
