#!/usr/bin/env bash
# accelerate 1.15.0: gather_for_metrics drops samples of the last batch if the DataLoader's sampler
# draws another number of samples than the dataset has, as SubsetRandomSampler does for a validation
# part. It computes the size of the last batch from the dataset's length. This is so in a single
# process too, where nothing needs dropping. No error, no warning; of a torch Subset it keeps all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 accelerate==1.15.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, WeightedRandomSampler

accelerator = Accelerator(cpu=True)
dataset = list(range(10))
part = [0, 1, 2, 3, 4, 5, 6]


def count_samples(loader):
    """Return how many samples the loader gives, and how many of them gather_for_metrics."""
    given, gathered = 0, 0
    for batch in accelerator.prepare(loader):
        given += len(batch)
        gathered += len(accelerator.gather_for_metrics(batch))
    return given, gathered


is_as_described = True
for name, loader, expected in (
    ("Subset of 7", DataLoader(Subset(dataset, part), batch_size=4), (7, 7)),
    ("SubsetRandomSampler of 7", DataLoader(dataset, 4, sampler=SubsetRandomSampler(part)), (7, 6)),
    (
        "WeightedRandomSampler of 15",
        DataLoader(dataset, 4, sampler=WeightedRandomSampler(torch.ones(10), 15)),
        (15, 14),
    ),
):
    given, gathered = count_samples(loader)
    print(f"{name:28} the loader gives {given:2}, gather_for_metrics {gathered:2}")
    is_as_described &= (given, gathered) == expected
sys.exit(0 if is_as_described else "gather_for_metrics now keeps all samples, or drops others")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
