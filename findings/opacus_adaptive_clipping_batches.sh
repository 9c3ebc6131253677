#!/usr/bin/env bash
# opacus 1.6.0: with clipping="adaptive" the norm to clip to follows the share of samples that are
# not clipped. In BatchMemoryManager, which says that zero_grad leaves the sum of a large batch
# until it is over, the counts for this share are set to zero with each small batch, so that the
# last small one alone counts: the norm can rise where it should fall. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 opacus==1.6.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import math
import sys
import warnings

import torch
from opacus import GradSampleModule
from opacus.optimizers import AdaClipDPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.disable()
large, rate, quantile = 16, 0.5, 0.5
# Gradients of a sum of w * x are x, so that these are the samples' norms, and 12 of 16 are below 1.
sizes = torch.tensor([0.5] * 12 + [2.0] * 4)[:, None]


def norm_after_one_step(small):
    """Return the norm to clip to, 1 at first, after a large batch in small ones of a given size."""
    loader = DataLoader(TensorDataset(sizes), batch_size=large)
    model = GradSampleModule(torch.nn.Linear(1, 1, bias=False), loss_reduction="sum")
    optimizer = AdaClipDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        target_unclipped_quantile=quantile,
        clipbound_learning_rate=rate,
        max_clipbound=10.0,
        min_clipbound=0.1,
        unclipped_num_std=1e-6,
        max_grad_norm=1.0,
        expected_batch_size=large,
        loss_reduction="sum",
    )
    manager = BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=small, optimizer=optimizer
    )
    with manager as batches:
        for (x,) in batches:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return float(optimizer.max_grad_norm)


is_as_described = True
expected = math.exp(-rate * (12 / 16 - quantile))
print(f"12 of 16 samples are not clipped to 1, so the next norm should be {expected:.4f}")
for small in (16, 8, 4):
    norm = norm_after_one_step(small)
    last = (sizes[-small:] < 1).float().mean().item()
    by_last = math.exp(-rate * (last - quantile))
    print(f"in batches of {small:2}: {norm:.4f}; by the last of them alone {by_last:.4f}")
    is_as_described &= abs(norm - by_last) < 1e-3
    is_as_described &= (abs(norm - expected) < 1e-3) == (small == large)
sys.exit(0 if is_as_described else "all small batches now count")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
