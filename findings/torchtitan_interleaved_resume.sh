#!/usr/bin/env bash
# torchtitan 0.3.0: an interleaved loader with stopping_strategy="all_exhausted" goes on "until
# every source has been exhausted at least once". Its state_dict has the random numbers and the
# places in all sources, but not which sources have been exhausted. So a run that is resumed after
# the first was waits for that one again: of two sources of 100 sequences it takes 200 and 203,
# where a run without a stop takes 108 and 100. No error, no warning; resumed before any source has
# been exhausted it is as without a stop.
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
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HFDataSource,
    InterleavedHuggingFaceTextDataLoader,
)

SEQUENCES, LENGTH = 100, 4
tokenizer = types.SimpleNamespace(
    encode=lambda text, **options: [int(word) for word in text.split()] + [0]
)
for number, name in ((1, "first"), (2, "second")):
    texts = [" ".join([str(number)] * LENGTH)] * SEQUENCES
    DATASETS[name] = DatasetConfig(
        path=name,
        loader=lambda path, texts=texts: Dataset.from_dict({"text": texts}),
        sample_processor=lambda sample: sample["text"],
    )


def new_loader():
    return InterleavedHuggingFaceTextDataLoader.Config(
        sources=[HFDataSource(dataset=name, infinite=False) for name in ("first", "second")],
        stopping_strategy="all_exhausted",
    ).build(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=LENGTH, local_batch_size=1)


def source(batch):
    return batch[0]["input"][0, 0].item()


whole = [source(batch) for batch in new_loader()]
print(f"without a stop: {whole.count(1)} of the first source, {whole.count(2)} of the second")
is_as_described = True
repeats = whole.index(1, [i for i, n in enumerate(whole) if n == 1][SEQUENCES - 1] + 1)
for stop in (50, 150, repeats + 1, len(whole) - 2):
    loader = new_loader()
    iterator = iter(loader)
    taken = [source(next(iterator)) for _ in range(stop)]
    resumed = new_loader()
    resumed.load_state_dict(loader.state_dict())
    taken += [source(batch) for batch in resumed]
    print(f"resumed after {stop}: {taken.count(1)} of the first, {taken.count(2)} of the second")
    is_as_described &= taken[: len(whole)] == whole
    is_as_described &= len(taken) > 1.5 * len(whole) if stop > repeats else taken == whole
sys.exit(0 if is_as_described else "a resumed loader now ends where the uninterrupted one does")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
