#!/usr/bin/env bash
# torch 2.13.0: loss_parallel() stays on if its block raises, as with label_smoothing, which it does
# not support. Later F.cross_entropy of DTensors that are not split by class, outside of any block,
# raises an error about loss_parallel, until another block has ended well.
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
logits, labels = torch.randn(4, 6), torch.randint(6, (4,))


def distributed(placement, of_labels):
    placed = distribute_tensor(logits, mesh, [placement])
    return placed, distribute_tensor(labels, mesh, [of_labels])


by_class = distributed(Shard(1), Replicate())
by_token = distributed(Shard(0), Shard(0))


def attempt(what, operands, **options):
    try:
        result = f"{F.cross_entropy(*operands, **options).full_tensor().item():.4f}"
    except Exception as error:
        result = f"{type(error).__name__}: {str(error)[:60]}"
    if dist.get_rank() == 0:
        print(f"{what}: {result}")
    return result


before = attempt("outside, before", by_token)
try:
    with loss_parallel():
        F.cross_entropy(*by_class, label_smoothing=0.1)
except RuntimeError as error:
    if dist.get_rank() == 0:
        print(f"in a block, with label_smoothing: {str(error)[:60]}")
after = attempt("outside, after it", by_token)
with loss_parallel():
    attempt("in another block", by_class)
at_last = attempt("outside, after that", by_token)
dist.destroy_process_group()
is_left_on = before == at_last and "loss_parallel() requires" in after
sys.exit(0 if is_left_on else "loss_parallel() now ends with its block")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
