#!/usr/bin/env bash
# opacus 1.6.0: BatchMemoryManager tells the optimizer which small batches end a large one when its
# sampler draws them, which a DataLoader with workers does ahead. After a loop that is left early,
# here at the end of a large batch, what was drawn ahead is still in the optimizer's queue, so that
# later loops step at other places: once with 24 samples in place of 16, divided by 16, and with the
# last samples of a loop only in the next one. Without workers all is as before. No error, no
# warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 opacus==1.6.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.disable()
large, small, samples = 16, 4, 64
dataset = TensorDataset(torch.arange(samples))


def sizes_of_steps(workers, loops):
    """Return how many samples each step has, loop by loop, which ends after given small batches."""
    options = {"num_workers": workers, "prefetch_factor": 3} if workers else {}
    loader = DataLoader(dataset, batch_size=large, **options)
    model = GradSampleModule(torch.nn.Embedding(samples, 1))
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=1e6,
        expected_batch_size=large,
    )
    weight = model._module.weight
    sizes = []
    for end in loops:
        sizes.append([])
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=small, optimizer=optimizer
        )
        with manager as batches:
            for number, (indices,) in enumerate(batches, start=1):
                before = weight.detach().clone()
                model(indices[:, None]).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                moved = (weight != before).sum().item()
                if moved:
                    sizes[-1].append(moved)
                if number == end:
                    break
    return sizes


is_as_described = True
whole = samples // small
for workers in (0, 2):
    for first in (whole, large // small):
        sizes = sizes_of_steps(workers, (first, whole, whole))
        print(f"{workers} workers, first loop of {first} small batches; samples in each step:")
        for name, row in zip(("first", "second", "third"), sizes, strict=True):
            print(f"    {name} loop: {row}")
        is_left = workers > 0 and first < whole
        is_as_described &= sizes[0] == [large] * (first * small // large)
        is_even = all(row == [large] * (samples // large) for row in sizes[1:])
        is_as_described &= is_even != is_left
sys.exit(0 if is_as_described else "later loops now step at the end of each large batch")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
