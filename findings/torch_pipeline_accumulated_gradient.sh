#!/usr/bin/env bash
# torch 2.13.0: a schedule of torch.distributed.pipelining divides the gradients by the number of
# microbatches at the end of each step(), with scale_grads=True, the default. It divides what was
# there before as well: of two steps whose gradients are to add up, the first counts 1/4 with 4
# microbatches. No error, no warning. The first step alone is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, is_last = dist.get_rank(), dist.get_rank() == 1
torch.manual_seed(0)
layers = [torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 3).double()]
inputs = torch.randn(2, 8, 4, dtype=torch.float64)
labels = torch.randint(3, (2, 8))


def gradients_of_batch(number):
    """Return the gradient of this rank's layer without a pipeline."""
    model = copy.deepcopy(torch.nn.Sequential(*layers))
    cross_entropy(model(inputs[number]), labels[number]).backward()
    return model[rank].weight.grad


is_as_described = True
first, second = gradients_of_batch(0), gradients_of_batch(1)
for schedule_class in (ScheduleGPipe, Schedule1F1B):
    layer = copy.deepcopy(layers[rank])
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
    schedule = schedule_class(stage, n_microbatches=4, loss_fn=cross_entropy)
    accumulated = []
    for number in range(2):
        if is_last:
            schedule.step(target=labels[number])
        else:
            schedule.step(inputs[number])
        accumulated.append(layer.weight.grad.clone())
    if is_last:
        print(f"{schedule_class.__name__}: first weight's gradient")
        print(f"    of batch 0: {first[0, 0]:.4f}, of batch 1: {second[0, 0]:.4f}")
        print(f"    after step(batch 0): {accumulated[0][0, 0]:.4f}")
        print(f"    after step(batch 1): {accumulated[1][0, 0]:.4f}", end=", ")
        print(f"where the sum is {(first + second)[0, 0]:.4f}")
    is_as_described &= torch.allclose(accumulated[0], first)
    is_as_described &= torch.allclose(accumulated[1], first / 4 + second)
dist.destroy_process_group()
sys.exit(0 if is_as_described else "a step no longer divides the gradients of earlier ones")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
