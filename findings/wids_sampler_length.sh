#!/usr/bin/env bash
# wids 0.1.11: a DistributedChunkedSampler with num_samples has the length of the whole dataset
# divided by the replicas, not that of what it yields: for 100 of 1000 samples on four ranks it is
# 250 on each, which yields 25. A DataLoader takes its length from it, and so does a schedule of
# learning rates made for that many steps. Without num_samples the last ranks, too, yield less than
# their length if the replicas do not divide the dataset. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 wids==0.1.11
cat > "$folder/program.py" <<'PROGRAM'
import os
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")

import torch.distributed
import torch.multiprocessing
import wids
from torch.utils.data import DataLoader

cases = {
    "1000 samples": (1000, None),
    "100 of 1000 samples": (1000, 100),
    "9 samples": (9, None),
}


def count(rank, store, queue):
    """Put the length and the number of samples of this rank for each case."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=4
    )
    counts = []
    for size, num_samples in cases.values():
        dataset = range(size)
        sampler = wids.DistributedChunkedSampler(dataset, num_samples=num_samples)
        loader = DataLoader(dataset, batch_size=1, sampler=sampler)
        counts.append((len(loader), len(list(loader))))
    queue.put((rank, counts))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(count, args=(os.path.join(folder, "store"), queue), nprocs=4)
    counts_of_ranks = [counts for _, counts in sorted(queue.get() for _ in range(4))]
    seen = list(zip(*counts_of_ranks, strict=True))
    for name, counts in zip(cases, seen, strict=True):
        lengths = [length for length, _ in counts]
        numbers = [number for _, number in counts]
        print(f"{name}, 4 ranks: lengths {lengths}, samples {numbers}")
    is_as_described = seen[0] == ((250, 250),) * 4 and seen[1] == ((250, 25),) * 4
    is_as_described &= seen[2] == ((3, 3), (3, 3), (3, 3), (3, 0))
    sys.exit(0 if is_as_described else "lengths are numbers of samples")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
