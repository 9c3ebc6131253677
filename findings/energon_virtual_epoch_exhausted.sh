#!/usr/bin/env bash
# megatron-energon 7.4.1: with virtual_epoch_length and repeat=False the data comes once, and every
# virtual epoch after that is empty. The docstring of EpochizeDataset, which makes them, says that
# it repeats the underlying dataset if the iterator is exhausted; it keeps the exhausted one. So a
# loop over epochs goes on without a single batch, and the length of the loader says otherwise. No
# error, no warning; without virtual epochs each loop has all data.
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
from megatron.energon import WorkerConfig, get_loader, get_train_dataset
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


seen = []
with tempfile.TemporaryDirectory() as root:
    folder = write(pathlib.Path(root) / "numbers", range(40))
    for length, repeat in ((0, False), (14, True), (14, False)):
        dataset = get_train_dataset(
            folder,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=2,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            virtual_epoch_length=length,
            repeat=repeat,
        )
        loader = get_loader(dataset)
        counts = [len(list(loader)) for _ in range(5)]
        seen.append(counts)
        print(f"40 samples, virtual_epoch_length={length}, repeat={repeat}: {len(loader)} batches")
        print(f"    of 2 samples in five loops: {counts}")
is_as_described = seen == [[20] * 5, [14] * 5, [14, 6, 0, 0, 0]]
sys.exit(0 if is_as_described else "an exhausted dataset starts again")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
