#!/usr/bin/env bash
# wids 0.1.11: DistributedChunkedSampler(num_replicas=..., rank=0) takes the rank of the process in
# place of the 0. Where replicas are fewer than processes, as under tensor parallelism, processes of
# one model then read different samples: of two models on four processes the second process gets the
# samples of the other model. No error, no warning; a rank of 1 is taken as it is given, and the
# DistributedSampler of torch takes both.
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
from torch.utils.data import DistributedSampler

dataset = range(16)
tensor_parallel_size = 2  # four processes, of which 0 and 1, 2 and 3 train one model


def read(process, store, queue):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=process, world_size=4
    )
    options = {"num_replicas": 2, "rank": process // tensor_parallel_size, "shuffle": False}
    queue.put(
        (
            process,
            options["rank"],
            list(wids.DistributedChunkedSampler(dataset, **options)),
            list(DistributedSampler(dataset, **options)),
        )
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(read, args=(os.path.join(folder, "store"), queue), nprocs=4)
    results = sorted(queue.get() for _ in range(4))
    for process, rank, samples, of_torch in results:
        print(f"process {process}, rank={rank}: {samples}; DistributedSampler {of_torch}")
    samples = [result[2] for result in results]
    of_torch = [result[3] for result in results]
    low = list(range(8))
    high = list(range(8, 16))
    is_as_described = of_torch[0] == of_torch[1] != of_torch[2] == of_torch[3]
    is_as_described &= samples == [low, high, high, high]
    sys.exit(0 if is_as_described else "a rank of 0 is taken as it is given")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
