#!/usr/bin/env bash
# fairscale 0.4.13: the backward of copy_to_model_parallel_region all-reduces the gradient that it
# is handed in place, though autograd hands the same tensor to the other side of a sum. So in h +
# copy_to_model_parallel_region(h) the plain h gets the sum over all ranks as well, rather than its
# own rank's gradient. With a factor of 1 before the copy, which gives it a gradient of its own, the
# result is right. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 fairscale==0.4.13
cat > "$folder/program.py" <<'PROGRAM'
import contextlib
import io
import sys

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import (
    copy_to_model_parallel_region,
    destroy_model_parallel,
    initialize_model_parallel,
)

dist.init_process_group("gloo")
with contextlib.redirect_stdout(io.StringIO()):
    initialize_model_parallel(dist.get_world_size())
rank = dist.get_rank()
upstream = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
total = torch.tensor([1.0, 2.0, 3.0]) * 3


def gradient(combine):
    """Return the gradient of hidden states that enter a sum directly and by way of the copy."""
    states = torch.zeros(3, requires_grad=True)
    (combine(states * 1.0) * upstream).sum().backward()
    return states.grad


results = {
    "h + copy(h)": gradient(lambda h: h + copy_to_model_parallel_region(h)),
    "copy(h) + h": gradient(lambda h: copy_to_model_parallel_region(h) + h),
    "h + 1 * copy(h)": gradient(lambda h: h + 1.0 * copy_to_model_parallel_region(h)),
}
expected = upstream + total  # of the plain h, and of the copy
for turn in range(dist.get_world_size()):
    if rank == turn:
        print(f"rank {rank}: upstream {upstream.tolist()}, expected {expected.tolist()}")
        for label, value in results.items():
            print(f"    {label:20} {value.tolist()}", flush=True)
    dist.barrier()
destroy_model_parallel()
dist.destroy_process_group()
is_as_described = torch.equal(results["h + 1 * copy(h)"], expected)
is_as_described &= torch.equal(results["h + copy(h)"], 2 * total)
sys.exit(0 if is_as_described else "the copy now leaves the gradient of others alone")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
