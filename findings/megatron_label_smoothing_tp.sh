#!/usr/bin/env bash
# megatron-core 0.16.1 (0.19.2, which needs Python 3.12, does the same):
# vocab_parallel_cross_entropy with label_smoothing smooths over each rank's own part of the
# vocabulary. Under tensor parallelism ranks return different losses, none of which is that of one
# rank, and the gradient is another one too. Without smoothing all agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 megatron-core==0.16.1
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

torch.cuda.current_device = lambda: "cpu"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
logits = torch.randn(1, 1, 8)  # of one token
labels = torch.tensor([[3]])


def loss_of_ranks(label_smoothing, size):
    """Return each rank's loss, where ``size`` ranks share the columns of the logits."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    columns = logits.chunk(size, -1)[rank % size].clone()
    loss = vocab_parallel_cross_entropy(columns, labels, label_smoothing)
    parallel_state.destroy_model_parallel()
    of_ranks = torch.empty(2)
    dist.all_gather_into_tensor(of_ranks, loss.reshape(1))
    return of_ranks


whole, of_ranks = loss_of_ranks(0.0, 1)[0].item(), loss_of_ranks(0.0, 2)
smoothed_whole = loss_of_ranks(0.2, 1)[0].item()
smoothed_of_ranks = loss_of_ranks(0.2, 2)
if rank == 0:
    print("no smoothing:  one rank", whole, "two ranks", of_ranks.tolist())
    print("smoothing 0.2: one rank", smoothed_whole, "two ranks", smoothed_of_ranks.tolist())
differs = (smoothed_of_ranks - smoothed_whole).abs() > 1e-2
is_as_described = (
    torch.allclose(of_ranks, torch.full((2,), whole))
    and differs.all()
    and (smoothed_of_ranks[0] - smoothed_of_ranks[1]).abs() > 1e-2
)
dist.destroy_process_group()
sys.exit(0 if is_as_described else "ranks now agree with one rank")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
