#!/usr/bin/env bash
# torch 2.13.0: all_reduce with MAX or MIN over gloo keeps a NaN of one rank and drops that of
# another, so that a rank's NaN may go unseen. torch.maximum and torch.minimum keep every NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, nan = dist.get_rank(), float("nan")
of_ranks = torch.tensor([[1.0, nan], [nan, 1.0]])
reduced = {}
for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
    reduced[str(op)] = of_ranks[rank].clone()
    dist.all_reduce(reduced[str(op)], op=op)
if rank == 0:
    print("rank 0:", of_ranks[0].tolist(), "rank 1:", of_ranks[1].tolist())
    print("torch.maximum:", torch.maximum(*of_ranks).tolist())
    for op, result in reduced.items():
        print(f"all_reduce, {op}:", result.tolist())
keeps_all = torch.maximum(*of_ranks).isnan().all()
loses_one = all(result.isnan().sum() == 1 for result in reduced.values())
dist.destroy_process_group()
sys.exit(0 if keeps_all and loses_one else "all_reduce no longer drops the NaN of one rank")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
