#!/usr/bin/env bash
# torch 2.13.0, gloo: torch.distributed.nn.functional.all_gather (deprecated, and differentiable)
# gives a wrong gradient if that of its results lies transposed in memory: its backward receives
# into tensors of the same strides, and gloo fills them in order of memory, so that elements end up
# at other places. A contrastive loss by einsum trains in a wrong direction, as does attention to
# gathered keys; the same loss by matmul, whose gradient lies in order, is right. The losses
# themselves are right, and there is no error and no warning of it. Its successor,
# torch.distributed._functional_collectives.all_gather_single, is right.
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
import torch.distributed._functional_collectives as collectives
import torch.distributed.nn.functional as differentiable
from torch.nn.functional import cross_entropy

warnings.simplefilter("ignore", FutureWarning)  # that all_gather is deprecated
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def part(of_rank, *shape):
    generator = torch.Generator().manual_seed(of_rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def by_matmul(own, gathered, of_rank):
    return cross_entropy(own @ gathered.T, torch.arange(len(own)) + of_rank * len(own))


def by_einsum(own, gathered, of_rank):
    logits = torch.einsum("nd,md->nm", own, gathered)
    return cross_entropy(logits, torch.arange(len(own)) + of_rank * len(own))


def attention(own, gathered, of_rank):
    """Attend from a rank's tokens to those of all; (token, head, feature)."""
    queries, keys = own.transpose(0, 1), gathered.transpose(0, 1)
    return ((queries @ keys.transpose(1, 2)).softmax(-1) @ keys).square().sum()


def old_gather(tensor):
    return torch.cat(differentiable.all_gather(tensor))


def new_gather(tensor):
    return collectives.all_gather_single(tensor, 0, dist.group.WORLD)


is_as_described = True
for function, shape, is_wrong in (
    (by_matmul, (8, 16), False),
    (by_einsum, (8, 16), True),
    (attention, (8, 2, 16), True),
):
    parts = [part(each, *shape) for each in range(ranks)]
    losses = [function(each, torch.cat(parts), i) for i, each in enumerate(parts)]
    expected = torch.autograd.grad(sum(losses), parts)[rank]
    for gather in (old_gather, new_gather):
        own = part(rank, *shape)
        loss = function(own, gather(own), rank)
        loss.backward()
        off = ((own.grad - expected).norm() / expected.norm()).item()
        cosine = torch.cosine_similarity(own.grad.flatten(), expected.flatten(), dim=0).item()
        if rank == 0:
            print(f"{function.__name__:9} {gather.__name__}:", end=" ")
            print(f"loss off by {abs(loss - losses[rank]).item():.0e},", end=" ")
            print(f"gradient by {off:.0%} of its norm, cosine {cosine:.2f}")
        is_as_described &= torch.allclose(loss, losses[rank])
        is_as_described &= off > 0.3 if is_wrong and gather is old_gather else off < 1e-9
dist.destroy_process_group()
sys.exit(0 if is_as_described else "the gradient of all_gather is another one now")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
