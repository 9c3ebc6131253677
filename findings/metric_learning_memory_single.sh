#!/usr/bin/env bash
# pytorch-metric-learning 2.9.0: CrossBatchMemory puts a batch into the memory and then leaves out
# the pairs of a sample with itself. A batch of one sample, whose first and last place in the memory
# are the same, it takes for one that wraps around the end, and leaves out nothing. So with a batch
# size of 1, and in an epoch's last batch if that is left with one, a sample is its own positive:
# the loss is too low, and the gradient is another one. No error, no warning; for two samples or
# more it is right, also if they wrap around. (The authors fixed such pairs in general, as a bug.)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 pytorch-metric-learning==2.9.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from pytorch_metric_learning.losses import CrossBatchMemory, NTXentLoss

torch.manual_seed(0)
memory_size, embedding_size, classes = 16, 8, 3
is_as_described = True
for batch_size in (1, 2, 3, 5):
    loss = CrossBatchMemory(NTXentLoss(temperature=0.5), embedding_size, memory_size)
    differences, gradient_differences, step_losses = [], [], []
    seen = torch.zeros(0, embedding_size)
    seen_labels = torch.zeros(0, dtype=torch.long)
    for _ in range(3 * memory_size // batch_size):
        batch = torch.randn(batch_size, embedding_size, requires_grad=True)
        labels = torch.randint(classes, (batch_size,))
        seen = torch.cat([seen, batch.detach()])[-memory_size:]
        seen_labels = torch.cat([seen_labels, labels])[-memory_size:]

        own = torch.arange(len(seen) - batch_size, len(seen))  # Places of the batch, oldest first.
        same = labels[:, None] == seen_labels
        is_itself = torch.arange(len(seen)) == own[:, None]
        pairs = (*torch.where(same & ~is_itself), *torch.where(~same))
        expected = NTXentLoss(temperature=0.5)(batch, labels, pairs, seen, seen_labels)
        got = loss(batch, labels)
        gradients = [torch.autograd.grad(value, batch)[0] for value in (got, expected)]
        differences.append((expected - got).item())
        gradient_differences.append((gradients[0] - gradients[1]).abs().max().item())
        step_losses.append(expected.item())
    mean = sum(step_losses) / len(step_losses)
    print(f"batches of {batch_size}: mean loss {mean:.3f} without pairs with itself;", end=" ")
    print(f"CrossBatchMemory's is {sum(differences) / len(differences):.3f} lower,", end=" ")
    print(f"a gradient is off by up to {max(gradient_differences):.3f}")
    if batch_size == 1:
        is_as_described &= sum(differences) / len(differences) > 0.1 * mean
        is_as_described &= max(gradient_differences) > 0.1
    else:
        is_as_described &= max(map(abs, differences)) < 1e-4 and max(gradient_differences) < 1e-4
sys.exit(0 if is_as_described else "a single sample is no longer its own positive")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
