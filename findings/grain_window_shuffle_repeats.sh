#!/usr/bin/env bash
# grain 0.2.18: WindowShuffleMapDataset, of a number of elements that the window does not divide,
# repeats some in an epoch and leaves out as many others: of the last window, which is cut short, it
# still permutes window_size indices, and those past the end mean elements of the beginning. Its
# documentation promises a one-to-one mapping. The number of elements is right, and
# WindowShuffleIterDataset, for iterators, has each of them once. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5 grain==0.2.18
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys

logging.disable()
import grain  # noqa: E402
from grain.experimental import WindowShuffleIterDataset, WindowShuffleMapDataset  # noqa: E402

is_as_described = True
for size, window in ((1000, 250), (1000, 300), (1000, 2000)):
    print(f"{size} elements, a window of {window}")
    source = grain.MapDataset.source(range(size))
    options = {"window_size": window, "seed": 0}
    orders = {
        "WindowShuffleMapDataset": WindowShuffleMapDataset(source, **options),
        "WindowShuffleIterDataset": WindowShuffleIterDataset(source.to_iter_dataset(), **options),
        "shuffle()": source.shuffle(seed=0),
    }
    for name, dataset in orders.items():
        elements = list(dataset)
        repeated = len(elements) - len(set(elements))
        missing = len(set(range(size)) - set(elements))
        print(f"    {name}: {len(elements)} come, {repeated} of them again, {missing} never")
        is_as_described &= len(elements) == size
        if name == "WindowShuffleMapDataset" and size % window > 0:
            is_as_described &= repeated == missing > 50
        else:
            is_as_described &= repeated == missing == 0
sys.exit(0 if is_as_described else "WindowShuffleMapDataset has each element once")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
