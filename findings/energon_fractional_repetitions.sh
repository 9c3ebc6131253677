#!/usr/bin/env bash
# megatron-energon 7.4.1: a dataset of a blend_epochized with a fractional number of repetitions has
# them in the first epoch alone. Each epoch that ends amid the dataset leaves it there, and the next
# one takes the rest of that pass for its first repetition: 1.5 repetitions are 1 from the second
# epoch on, and 0.5 are 0 in every third. The length of the loader is still the right one. No error,
# no warning; whole numbers are right.
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

blend = """
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend_epochized:
      - {{repetitions: {repetitions}, path: ./first}}
      - {{repetitions: 1, path: ./second}}
"""


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
with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    write(root / "first", range(40))
    write(root / "second", range(1000, 1040))
    for repetitions in (2, 1.5, 0.5):
        (root / "blend.yaml").write_text(blend.format(repetitions=repetitions))
        loader = get_loader(
            get_train_dataset(
                root / "blend.yaml",
                worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
                batch_size=1,
                shuffle_buffer_size=None,
                max_samples_per_sequence=None,
                repeat=False,
            )
        )
        print(f"{repetitions} times 40 samples and once 40 others: {len(loader)} batches of one")
        counts = seen[repetitions] = []
        for _ in range(6):
            numbers = [int(batch.text[0]) for batch in loader]
            first = sum(number < 1000 for number in numbers)
            counts.append((first, len(numbers) - first))
        print(f"    of each in six epochs: {counts}")
is_as_described = seen[2] == [(80, 40)] * 6
is_as_described &= seen[1.5] == [(60, 40)] + [(40, 40)] * 5
is_as_described &= seen[0.5] == [(20, 40), (20, 40), (0, 40)] * 2
sys.exit(0 if is_as_described else "fractional repetitions are the same in each epoch")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
