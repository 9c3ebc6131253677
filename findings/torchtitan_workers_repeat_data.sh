#!/usr/bin/env bash
# torchtitan 0.3.0: num_workers of a data loader is "number of worker processes for data loading",
# and with a data set in memory or on disk (not streamed; "c4_test", and any that is added as the
# documentation shows) each worker reads all of it, since HuggingFaceTextDataset does not ask which
# one it is. So with N workers every sequence comes N times, one right after the other, an epoch
# is N epochs of data, and a file that is read once is read N times. ChatDataset, for fine-tuning,
# has the same lines. No error, no warning; a streamed data set is shared out among workers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchtitan==0.3.0
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import types

from datasets import Dataset

logging.disable(logging.CRITICAL)

from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

DOCUMENTS = 8


def encode(text, **options):
    return [int(word) for word in text.split()] + [0]


tokenizer = types.SimpleNamespace(encode=encode)
texts = Dataset.from_dict({"text": [" ".join([str(n)] * 4) for n in range(1, DOCUMENTS + 1)]})
for name, loader in (
    ("in_memory", lambda path: texts),
    ("streamed", lambda path: texts.to_iterable_dataset(num_shards=4)),
):
    DATASETS[name] = DatasetConfig(
        path=name, loader=loader, sample_processor=lambda sample: sample["text"]
    )


def documents(name, num_workers):
    """Return the number of the document in each batch of one epoch."""
    loader = HuggingFaceTextDataLoader.Config(
        dataset=name, infinite=False, num_workers=num_workers
    ).build(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=4, local_batch_size=1)
    return [inputs["input"][0, 0].item() for inputs, _ in loader]


is_as_described = True
for name in ("in_memory", "streamed"):
    for num_workers in (0, 1, 2):
        order = documents(name, num_workers)
        print(f"{name}, num_workers={num_workers}: {len(order)} sequences:", *order)
        times = max(num_workers, 1) if name == "in_memory" else 1
        is_as_described &= sorted(order) == sorted(times * list(range(1, DOCUMENTS + 1)))
sys.exit(0 if is_as_described else "workers now share out a data set in memory")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
