#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.nn.functional.all_reduce (deprecated, and differentiable) takes
# any op, but its backward reduces the gradients with the same one: that of PRODUCT multiplies the
# ranks' gradients, and that of MAX gives each rank the largest. SUM is right. Its successor,
# torch.distributed._functional_collectives.all_reduce, refuses the others in backward.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

warnings.simplefilter("ignore")  # that it is deprecated
dist.init_process_group("gloo")
rank = dist.get_rank()
values = [3.0, 5.0]  # of the ranks
# The loss is that of both ranks, once and twice the reduced value. So the gradient by a rank's
# value is 3 times the derivative of 3 * 5, of max(3, 5) and of 3 + 5.
expected = {"PRODUCT": 3 * values[1 - rank], "MAX": 3.0 * rank, "SUM": 3.0}
found = {}
for op in expected:
    x = torch.tensor(values[rank], requires_grad=True)
    whole = all_reduce(x, op=getattr(dist.ReduceOp, op))
    ((rank + 1) * whole).backward()
    found[op] = x.grad.item()
print(f"rank {rank}: expected gradients {expected}, found {found}\n", end="", flush=True)
is_as_described = found == {"PRODUCT": 2.0, "MAX": 2.0, "SUM": 3.0}
dist.destroy_process_group()
sys.exit(0 if is_as_described else "the gradient of PRODUCT or MAX is another one now")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
