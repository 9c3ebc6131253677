#!/usr/bin/env bash
# torch-geometric 2.8.1: InstanceNorm with track_running_stats=True, given a batch vector, computes
# its running mean and variance from activations with their gradients. So these buffers hold the
# graphs of all training steps so far, which grow with each. A copy of the model, as for an average
# of weights, is then refused by deepcopy, and so is a backward of the model in evaluation mode, as
# for fine-tuning with frozen statistics or for saliency: both look like mistakes of one's own.
# Nothing in training warns of it; without a batch vector, and BatchNorm, keep no graph.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torch-geometric==2.8.1
cat > "$folder/program.py" <<'PROGRAM'
import copy
import sys

import torch
from torch_geometric.nn import BatchNorm, InstanceNorm

torch.manual_seed(0)
graphs, nodes, channels = 4, 6, 8
batch = torch.arange(graphs).repeat_interleave(nodes)


class Model(torch.nn.Module):
    def __init__(self, norm, takes_batch):
        super().__init__()
        self.linear = torch.nn.Linear(channels, channels)
        self.norm, self.takes_batch = norm, takes_batch

    def forward(self, x):
        return self.norm(self.linear(x), *([batch] if self.takes_batch else []))


def graph_size(tensor):
    seen, rest = set(), [tensor.grad_fn]
    while rest:
        node = rest.pop()
        if node is not None and node not in seen:
            seen.add(node)
            rest.extend(function for function, _ in node.next_functions)
    return len(seen)


def error_of(function):
    try:
        function()
    except RuntimeError as error:
        return str(error).split(".")[0]
    return None


is_as_described = True
for name, norm, takes_batch in (
    ("BatchNorm", BatchNorm(channels), False),
    ("InstanceNorm", InstanceNorm(channels, track_running_stats=True), False),
    ("InstanceNorm with batch", InstanceNorm(channels, track_running_stats=True), True),
):
    model = Model(norm, takes_batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mean = norm.module.running_mean if name == "BatchNorm" else None
    sizes = []
    for step in range(1, 41):
        optimizer.zero_grad()
        model(torch.randn(graphs * nodes, channels)).pow(3).mean().backward()
        optimizer.step()
        if step % 10 == 0:
            sizes.append(graph_size(mean if mean is not None else norm.running_mean))
    copied = error_of(lambda model=model: copy.deepcopy(model))
    model.eval()
    x = torch.randn(graphs * nodes, channels)
    evaluated = error_of(lambda model=model, x=x: model(x).pow(3).mean().backward())
    print(f"{name}: nodes of the graph that the running mean holds, after each 10 steps: {sizes}")
    print("    deepcopy:", copied or "no error")
    print("    backward in evaluation mode:", evaluated or "no error")
    if takes_batch:
        is_as_described &= sizes[0] > 0 and sizes[3] > 3 * sizes[0]
        is_as_described &= bool(copied) and bool(evaluated)
    else:
        is_as_described &= sizes == [0] * 4 and not copied and not evaluated
sys.exit(0 if is_as_described else "running statistics no longer hold the graphs of all steps")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
