#!/usr/bin/env bash
# torch 2.13.0: the zero-bubble schedules of torch.distributed.pipelining split backward and ask for
# the gradients of the stage's own parameters alone. Those of a module that only loss_fn uses, as an
# output layer in the loss, get none, and are not trained; with GPipe, 1F1B and its interleaved form
# they do. The loss and the stages' gradients are right. No error, no warning.
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
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

dist.init_process_group("gloo")
rank = dist.get_rank()
inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
labels = torch.tensor([0, 1, 2, 3])


def gradients(kind):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    head = nn.Linear(8, 16)
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = kind([stage], 4, loss_fn=lambda x, y: F.cross_entropy(head(x), y))
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=labels)
    return layers[rank].weight.grad, head.weight.grad


(layer, head), (layer_of_zero_bubble, head_of_zero_bubble) = map(
    gradients, (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
)
is_as_described = torch.allclose(layer, layer_of_zero_bubble)
if rank == 1:
    print("the stage's gradients are equal:", is_as_described)
    print("gradient of the output layer in the loss, 1F1B:", head.norm().item())
    print("zero bubble:", head_of_zero_bubble)
    is_as_described &= head.norm().item() > 1 and head_of_zero_bubble is None
dist.destroy_process_group()
sys.exit(0 if is_as_described else "zero-bubble schedules now give what the loss uses a gradient")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
