#!/usr/bin/env bash
# accelerate 1.15.0: skip_first_batches of a loader with dispatch_batches=True, over a dataset with
# indices, skips that many batches of the loader inside. Each step takes one of these for every
# process, so with P processes an epoch that is resumed after N steps begins N / P steps in: the
# rest comes a second time, and the epoch has more steps left. No error, no warning; without
# dispatch_batches, with split_batches=True and over an iterable dataset it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 accelerate==1.15.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset, IterableDataset

SAMPLES, BATCH_SIZE, DONE = 48, 4, 4


class Indexed(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor(index) for index in range(SAMPLES))


def steps(loader):
    """Return for each step the samples of all ranks, in order."""
    return [sorted(accelerator.gather(batch).tolist()) for batch in loader]


is_as_described = True
for dataset, dispatch_batches, split_batches in (
    (Indexed(), False, False),
    (Stream(), True, False),
    (Indexed(), True, True),
    (Indexed(), True, False),
):
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches=dispatch_batches, split_batches=split_batches
        ),
    )
    loader = accelerator.prepare(DataLoader(dataset, batch_size=BATCH_SIZE))
    epoch = steps(loader)
    rest = steps(accelerator.skip_first_batches(loader, DONE))
    again = sorted(set().union(*epoch[:DONE]) & set().union(*rest))
    if accelerator.is_main_process:
        print(f"{type(dataset).__name__}, {dispatch_batches=}, {split_batches=}:", end=" ")
        print(f"{len(epoch)} steps, {DONE} of them done, {len(rest)} left")
        print("    done:    ", epoch[:DONE])
        print("    left:    ", rest)
        print("    repeated:", again or "none")
    if isinstance(dataset, Indexed) and dispatch_batches and not split_batches:
        processes = accelerator.num_processes
        is_as_described &= processes == 2 and rest == epoch[DONE // processes :]
    else:
        is_as_described &= rest == epoch[DONE:]
accelerator.end_training()
sys.exit(0 if is_as_described else "batches that were dispatched are no longer repeated")
PROGRAM
"$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    "$folder/program.py"
