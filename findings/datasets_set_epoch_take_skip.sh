#!/usr/bin/env bash
# datasets 5.2.0 and accelerate 1.15.0: an IterableDataset that is shuffled and then split with
# take() and skip(), as the documentation of datasets advises, is split anew in each epoch: these
# keep the order of the shards, but set_epoch() still reseeds the shuffle buffer before them. Of a
# prepared DataLoader accelerate calls set_epoch() on each pass, so from the second on the training
# data has most of the examples that were split off for validation. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 datasets==5.2.0 \
    accelerate==1.15.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
examples = set(range(1000))
is_as_described = True
for shards in (1, 4):
    dataset = Dataset.from_dict({"example": sorted(examples)}).to_iterable_dataset(shards)
    for is_shuffled in (False, True):
        if is_shuffled:
            dataset = dataset.shuffle(seed=42, buffer_size=200)
        validation = {row["example"] for row in dataset.take(100)}
        loader = accelerator.prepare(DataLoader(dataset.skip(100), batch_size=50))
        print(f"{shards} shards, {'shuffled' if is_shuffled else 'not shuffled'}")
        for epoch in range(3):
            training = {example for batch in loader for example in batch["example"].tolist()}
            both, neither = training & validation, examples - training - validation
            print(f"    epoch {epoch}: {len(training)} to train, of which {len(both)}", end=" ")
            print(f"are among the 100 to validate; {len(neither)} in neither")
            if is_shuffled and epoch > 0:
                is_as_described &= len(training) == 900 and len(both) > 30
            else:
                is_as_described &= not both and not neither
sys.exit(0 if is_as_described else "set_epoch() no longer changes what skip() leaves")
PROGRAM
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/program.py"
