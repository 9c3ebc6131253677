#!/usr/bin/env bash
# megatron-energon 7.4.1: LimitDataset starts its dataset anew after each epoch, with
# reset_after_epoch=False, the default, too, though the docstring has that for True alone. So all
# epochs of a limited infinite dataset are the same few samples, and the others never come. No
# error, no warning; EpochizeDataset, which limits epochs also, goes on where it stopped.
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
    EpochizeDataset,
    LimitDataset,
    WorkerConfig,
    get_loader,
    get_train_dataset,
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


seen = {}
with tempfile.TemporaryDirectory() as root:
    folder = write(pathlib.Path(root) / "numbers", range(40))
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    for name, cls, options in (
        ("EpochizeDataset", EpochizeDataset, {}),
        ("LimitDataset, reset_after_epoch=True", LimitDataset, {"reset_after_epoch": True}),
        ("LimitDataset, reset_after_epoch=False", LimitDataset, {"reset_after_epoch": False}),
    ):
        dataset = get_train_dataset(
            folder,
            worker_config=config,
            batch_size=1,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
        )
        loader = get_loader(cls(dataset, 10, worker_config=config, **options))
        epochs = [[int(batch.text[0]) for batch in loader] for _ in range(4)]
        seen[name] = len(set(sum(epochs, [])))
        print(f"{name}, 10 of 40 samples in an epoch: four epochs have {seen[name]} of them")
        print(f"    first two: {epochs[0]}, {epochs[1]}")
is_as_described = list(seen.values()) == [40, 10, 10]
sys.exit(0 if is_as_described else "LimitDataset goes on where it stopped")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
