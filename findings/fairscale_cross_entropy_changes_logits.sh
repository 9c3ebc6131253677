#!/usr/bin/env bash
# fairscale 0.4.13: vocab_parallel_cross_entropy subtracts each token's largest logit from the
# logits that it is given, in place. What a caller computes of them afterwards is another number: a
# z-loss takes log Z - max for log Z, and so nearly vanishes, with its gradient. Before the call it
# is right, so the order of two lines changes the loss. F.cross_entropy leaves its input alone. No
# error, no warning: autograd is not told of the change.
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
import torch.nn.functional as F
from fairscale.nn.model_parallel import destroy_model_parallel, initialize_model_parallel
from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
from fairscale.nn.model_parallel.layers import ColumnParallelLinear
from fairscale.nn.model_parallel.mappings import gather_from_model_parallel_region

dist.init_process_group("gloo")
with contextlib.redirect_stdout(io.StringIO()):
    initialize_model_parallel(dist.get_world_size())
rank, tokens, hidden_size, vocab_size, z_loss_weight = dist.get_rank(), 6, 16, 32, 0.01
torch.manual_seed(0)
weight = torch.randn(vocab_size, hidden_size)
hidden = torch.randn(tokens, hidden_size)
labels = torch.randint(vocab_size, (tokens,))
head = ColumnParallelLinear(hidden_size, vocab_size, bias=False, gather_output=False)
rows = vocab_size // dist.get_world_size()
with torch.no_grad():
    head.weight.copy_(weight[rank * rows : (rank + 1) * rows])


def z_loss_of(logits):
    return z_loss_weight * logits.logsumexp(-1).square().mean()


def reference():
    states = hidden.double().requires_grad_()
    logits = states @ weight.double().T
    cross_entropy, z_loss = F.cross_entropy(logits, labels), z_loss_of(logits)
    (cross_entropy + z_loss).backward()
    return cross_entropy.item(), z_loss.item(), states.grad


def parallel(is_z_loss_first):
    states = hidden.clone().requires_grad_()
    logits = head(states)
    if is_z_loss_first:
        z_loss = z_loss_of(gather_from_model_parallel_region(logits))
        cross_entropy = vocab_parallel_cross_entropy(logits, labels).mean()
    else:
        cross_entropy = vocab_parallel_cross_entropy(logits, labels).mean()
        z_loss = z_loss_of(gather_from_model_parallel_region(logits))
    (cross_entropy + z_loss).backward()
    return cross_entropy.item(), z_loss.item(), states.grad


expected = reference()
first, last = parallel(True), parallel(False)
if rank == 0:
    for label, (cross_entropy, z_loss, gradient) in (
        ("one process, fp64", expected),
        ("z-loss, then cross-entropy", first),
        ("cross-entropy, then z-loss", last),
    ):
        error = (gradient - expected[2]).abs().max().item()
        print(f"{label:27} cross-entropy {cross_entropy:.5f}, z-loss {z_loss:.5f}", end=", ")
        print(f"gradient up to {error:.6f} off")
dist.barrier()
destroy_model_parallel()
dist.destroy_process_group()
is_as_described = abs(first[0] - expected[0]) < 1e-5 and abs(last[0] - expected[0]) < 1e-5
is_as_described &= abs(first[1] - expected[1]) < 1e-5 and last[1] < 0.2 * expected[1]
is_as_described &= bool((first[2] - expected[2]).abs().max() < 1e-5)
is_as_described &= bool((last[2] - expected[2]).abs().max() > 1e-3)
sys.exit(0 if is_as_described else "the logits are no longer changed by the loss")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
