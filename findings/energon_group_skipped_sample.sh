#!/usr/bin/env bash
# megatron-energon 7.4.1: a sample for which batch_group_criterion raises SkipSample, as its
# docstring allows, is not skipped: it goes into a batch of the group of the sample before it, whose
# key and batch size are still there. So batches hold samples that do not belong together, and some
# that were to be left out. No error, no warning; a skip in encode_sample is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 megatron-energon==7.4.1
cat > "$folder/program.py" <<'PROGRAM'
import contextlib
import io
import pathlib
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")

import webdataset
from megatron.energon import (
    DefaultTaskEncoder,
    SkipSample,
    WorkerConfig,
    get_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.flavors import BaseWebdatasetFactory


def write(folder, numbers):
    """Write a dataset of texts that are numbers."""
    folder.mkdir()
    with webdataset.TarWriter(str(folder / "shard.tar")) as shard:
        for number in numbers:
            shard.write({"__key__": f"{number:04}", "txt": str(number).encode()})
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        prepare = BaseWebdatasetFactory.prepare_dataset
        prepare(folder, ["shard.tar"], split_parts_ratio=[("train", 1.0)])
    description = "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
    (folder / ".nv-meta" / "dataset.yaml").write_text(description + "field_map: {text: txt}\n")
    return folder


def skip_fives(sample):
    if int(sample.text) % 10 == 5:
        raise SkipSample()
    return sample


class SkipsInEncodeSample(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample):
        return skip_fives(sample)

    @stateless
    def batch_group_criterion(self, sample):
        return int(sample.text) % 2, 4  # the key of the group and its batch size


class SkipsInCriterion(DefaultTaskEncoder):
    @stateless
    def batch_group_criterion(self, sample):
        return int(skip_fives(sample).text) % 2, 4


is_as_described = True
with tempfile.TemporaryDirectory() as root:
    folder = write(pathlib.Path(root) / "numbers", range(40))
    for encoder in (SkipsInEncodeSample(), SkipsInCriterion()):
        dataset = get_train_dataset(
            folder,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=None,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            repeat=False,
            task_encoder=encoder,
        )
        batches = [[int(text) for text in batch.text] for batch in get_loader(dataset)]
        fives = sorted(number for batch in batches for number in batch if number % 10 == 5)
        mixed = [batch for batch in batches if len({number % 2 for number in batch}) > 1]
        print(f"{type(encoder).__name__}: 40 numbers in groups of even and of odd ones")
        print(f"    numbers to be skipped that come: {fives}")
        print(f"    batches of both groups: {mixed}")
        if isinstance(encoder, SkipsInEncodeSample):
            is_as_described &= fives == [] and mixed == []
        else:
            is_as_described &= fives == [5, 15, 25, 35] and len(mixed) > 0
sys.exit(0 if is_as_described else "batch_group_criterion skips samples")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
