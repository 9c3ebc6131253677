#!/usr/bin/env bash
# torch 2.13.0: PeriodicModelAverager, as with DistributedDataParallel over subgroups, averages the
# parameters that have a gradient, each rank its own list of them. Of a mixture of experts in which
# ranks called different experts it so averages one expert with another of the same size. No error,
# no warning; where ranks called the same experts it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
subgroup, _ = dist.new_subgroups(group_size=1)


class Experts(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in weights)
        with torch.no_grad():
            for expert, weight in zip(self.experts, weights, strict=True):
                expert.weight.fill_(weight)

    def forward(self, tokens, chosen):
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                output[chosen == number] = expert(tokens[chosen == number])
        return output


def average(chosen_by_rank):
    """Return the experts' weights of both ranks after a backward and an average of the models."""
    model = Experts([1.0, 100.0])
    parallel = DistributedDataParallel(model, process_group=subgroup, find_unused_parameters=True)
    with torch.no_grad():  # ranks have trained on their own for some steps
        for expert in model.experts:
            expert.weight += rank * 0.5
    parallel(torch.ones(2, 1), torch.tensor(chosen_by_rank[rank])).sum().backward()
    PeriodicModelAverager(period=4).average_parameters(parallel.parameters())
    weights = [expert.weight.item() for expert in model.experts]
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, weights)
    return of_ranks


is_as_described = True
for chosen_by_rank, expected in (
    ([[0, 1], [0, 1]], [[1.25, 100.25], [1.25, 100.25]]),
    ([[0, 0], [1, 1]], [[50.75, 100.0], [1.5, 50.75]]),
):
    of_ranks = average(chosen_by_rank)
    if rank == 0:
        print("weights of two experts before: rank 0 [1.0, 100.0], rank 1 [1.5, 100.5]")
        print(f"    ranks' tokens chose {chosen_by_rank}")
        print(f"    after the average: rank 0 {of_ranks[0]}, rank 1 {of_ranks[1]}")
    is_as_described &= of_ranks == expected
dist.barrier()
dist.destroy_process_group(subgroup)
dist.destroy_process_group()
sys.exit(0 if is_as_described else "average_parameters no longer averages an expert with another")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
