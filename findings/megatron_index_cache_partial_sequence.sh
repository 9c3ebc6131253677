#!/usr/bin/env bash
# megatron-core 0.16.1: once a validation GPTDataset was built with the default
# drop_last_partial_validation_sequence=True, False is ignored, and the other way round: the indices
# are cached on disk, also without path_to_cache, under a hash of the options that lacks this one.
# So with full_validation tokens are left out that were asked for; with the cache removed they come.
# random_seed, for comparison, is part of the hash. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 megatron-core==0.16.1
cat > "$folder/program.py" <<'PROGRAM'
import os
import shutil
import sys
import tempfile
import types

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

# a tokenizer, as far as GPTDataset needs it
tokenizer = types.SimpleNamespace(
    vocab_size=1000, eod=0, eos=0, pad=999, unique_identifiers={"class": "Tokenizer"}
)


def tokens_of(prefix, random_seed=1, **options):
    """Return the tokens of each sample of one epoch of the data, as a validation dataset."""
    config = GPTDatasetConfig(
        random_seed=random_seed,
        sequence_length=8,
        blend_per_split=[None, ([prefix], None), None],
        full_validation=True,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **options,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [0, None, 0], lambda: True, config)
    dataset = builder.build()[1]
    samples = [dataset[index]["tokens"].tolist() for index in range(len(dataset))]
    return [[token for token in sample if token != 0] for sample in samples]


with tempfile.TemporaryDirectory() as folder:
    prefix = os.path.join(folder, "documents")
    writer = IndexedDatasetBuilder(prefix + ".bin", dtype=np.int32)
    writer.add_document(torch.arange(1, 31), [30])
    writer.finalize(prefix + ".idx")
    default = tokens_of(prefix)
    ignored = tokens_of(prefix, drop_last_partial_validation_sequence=False)
    other_seed = tokens_of(prefix, 2, drop_last_partial_validation_sequence=False)
    shutil.rmtree(os.path.join(prefix, "cache"))
    complete = tokens_of(prefix, drop_last_partial_validation_sequence=False)
    ignored_too = tokens_of(prefix)

for name, samples in (
    ("dropping the last partial sequence", default),
    ("not dropping it", ignored),
    ("not dropping it, another random_seed", other_seed),
    ("not dropping it, without the cache", complete),
    ("dropping it again", ignored_too),
):
    print(f"{name}: {len(samples)} samples, {sum(map(len, samples))} of 30 tokens")
is_as_described = len(default) == 3 and len(complete) == len(other_seed) == 4
is_as_described &= ignored == default and ignored_too == complete
sys.exit(0 if is_as_described else "the cache knows drop_last_partial_validation_sequence")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
