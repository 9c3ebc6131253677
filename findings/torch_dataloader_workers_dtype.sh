#!/usr/bin/env bash
# torch 2.13.0: a DataLoader without workers stacks samples of different types in a type that holds
# all of them. With workers it makes memory of the first sample's type and casts the others to it.
# So of token ids of which some files have int16, and those with large ids int32, ids change: 40000
# becomes -25536 and 70000 4464, only in batches that begin with an int16 sample. Of fp16 and fp32
# samples 100000 becomes inf. No error, no warning; num_workers=0 is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from torch.utils.data import ConcatDataset, DataLoader

small_ids = torch.tensor([[1, 2, 3]], dtype=torch.int16)
large_ids = torch.tensor([[40_000, 70_000, 5]], dtype=torch.int32)
small_features = torch.tensor([[1.0, 2.0]], dtype=torch.float16)
large_features = torch.tensor([[100_000.0, 2.0]], dtype=torch.float32)


def first_batch(samples, workers):
    return next(iter(DataLoader(ConcatDataset(samples), batch_size=2, num_workers=workers)))


if __name__ == "__main__":
    is_as_described = True
    for samples, wrong in (
        ([small_ids, large_ids], [[1, 2, 3], [-25_536, 4464, 5]]),
        ([large_ids, small_ids], None),
        ([small_features, large_features], [[1.0, 2.0], [float("inf"), 2.0]]),
        ([large_features, small_features], None),
    ):
        expected = torch.cat(samples)
        print(f"samples of {samples[0].dtype} and {samples[1].dtype}: {expected.tolist()}")
        for workers in (0, 1):
            got = first_batch(samples, workers)
            print(f"    num_workers={workers}: {got.tolist()}, {got.dtype}")
            if workers == 1 and wrong is not None:
                is_as_described &= got.tolist() == wrong and got.dtype == samples[0].dtype
            else:
                is_as_described &= torch.equal(got, expected) and got.dtype == expected.dtype
    sys.exit(0 if is_as_described else "workers no longer cast samples to the first one's type")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
