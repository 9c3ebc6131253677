#!/usr/bin/env bash
# megatron-energon 7.4.1: its documentation says that a loader can be saved at any iteration and
# goes on where it left off. With repeat=False and a shuffle buffer it does not if it is saved while
# the last samples come out of the buffer, which is then all that is left: the restored one reads
# the whole dataset again into that epoch, so that each sample of it comes twice. No error, no
# warning; saved earlier, or without a buffer, it is exact.
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
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset
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


def make_loader(folder, buffer_size):
    dataset = get_train_dataset(
        folder,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=2,
        shuffle_buffer_size=buffer_size,
        max_samples_per_sequence=None,
        repeat=False,
    )
    return get_savable_loader(dataset)


is_as_described = True
with tempfile.TemporaryDirectory() as root:
    folder = write(pathlib.Path(root) / "numbers", range(40))
    for buffer_size in (None, 10):
        expected = [batch.text for batch in make_loader(folder, buffer_size)]
        print(f"40 samples, shuffle_buffer_size {buffer_size}: {len(expected)} batches")
        for stop in (8, 15, 16, 19):
            loader = make_loader(folder, buffer_size)
            iterator = iter(loader)
            batches = [next(iterator).text for _ in range(stop)]
            state = loader.save_state_rank()
            restored = make_loader(folder, buffer_size)
            restored.restore_state_rank(state)
            batches += [batch.text for batch in restored]
            texts = sum(batches, [])
            twice = len(texts) - len(set(texts))
            print(f"    restored after {stop}: {len(batches)} batches, {twice} samples twice")
            if buffer_size is not None and stop > 15:
                is_as_described &= len(batches) == 40 and twice == 40
            else:
                is_as_described &= batches == expected
sys.exit(0 if is_as_described else "a restored loader ends its epoch")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
