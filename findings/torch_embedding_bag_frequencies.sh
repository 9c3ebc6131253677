#!/usr/bin/env bash
# torch 2.13.0, CPU: F.embedding_bag with scale_grad_by_freq=True is to divide a row's gradient by
# how often its id occurs in the batch. It divides by how often another id does: that of the n-th id
# by the number of the id at place n of all ids in order. So a row whose id occurs once may get a
# fourth of its gradient, and one whose id occurs 4 times 4 times it. No error, no warning, with
# mode "sum" and "mean" alike; F.embedding of the same ids, summed, divides right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.nn.functional as F

ids = torch.tensor([[0, 2, 2, 4], [2, 1, 2, 0]])  # 0 twice, 1 once, 2 four times, 4 once
counts = torch.bincount(ids.flatten(), minlength=5)
in_order = ids.flatten().sort().values


def gradient(bags_of):
    """Return the gradient of the weight, of which each row's elements are equal."""
    weight = torch.zeros(5, 2, dtype=torch.float64, requires_grad=True)
    bags_of(weight).sum().backward()
    return weight.grad[:, 0].tolist()


bags = {
    "embedding_bag": lambda mode, scale: lambda weight: F.embedding_bag(
        ids, weight, mode=mode, scale_grad_by_freq=scale
    ),
    "embedding": lambda mode, scale: lambda weight: getattr(
        F.embedding(ids, weight, scale_grad_by_freq=scale), mode
    )(1),
}
print("ids", ids.tolist(), "so that 0 to 4 occur", counts.tolist(), "times")
is_as_described = True
for mode in ("sum", "mean"):
    for name, of in bags.items():
        plain, scaled = (gradient(of(mode, scale)) for scale in (False, True))
        print(f"    {name:13} {mode:4} without scale_grad_by_freq {plain}, with it {scaled}")
        if name == "embedding":
            divisors = {i: counts[i].item() for i in (0, 1, 2, 4)}
        else:
            ids_used = enumerate((0, 1, 2, 4))
            divisors = {i: counts[in_order[place]].item() for place, i in ids_used}
        is_as_described &= scaled[3] == 0
        is_as_described &= all(scaled[i] == plain[i] / by for i, by in divisors.items())
sys.exit(0 if is_as_described else "embedding_bag divides by other frequencies now")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
