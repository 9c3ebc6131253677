#!/usr/bin/env bash
# grain 0.2.18: ConcatThenSplitIterDataset packs the short feature of a long element several times.
# If a feature like "inputs" is cut more than once, where "targets" of the same element fits as a
# whole, "targets" comes back with the third part, with the fifth and so on: where to cut it is
# counted from the beginning of the element, not of what is left. By the documentation only meta
# features are duplicated. Features of one length come right. No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5 grain==0.2.18
cat > "$folder/program.py" <<'PROGRAM'
import itertools
import logging
import sys

logging.disable()
import grain  # noqa: E402
import numpy as np  # noqa: E402
from grain.experimental import ConcatThenSplitIterDataset  # noqa: E402


def elements_of(lengths):
    """Return elements whose inputs are numbered from 1 on, and targets from 501 on."""
    elements, inputs, targets = [], 1, 501
    for inputs_length, targets_length in lengths:
        elements.append(
            {
                "inputs": np.arange(inputs, inputs + inputs_length),
                "targets": np.arange(targets, targets + targets_length),
            }
        )
        inputs += inputs_length
        targets += targets_length
    return elements


def tokens_in(rows, key):
    """Return the tokens of a feature in their order, without the padding, which is 0."""
    return [token for row in rows for token in row[key].tolist() if token != 0]


is_as_described = True
for name, lengths in (
    ("one length", [(20, 20), (7, 7), (13, 13), (25, 25)]),
    ("shorter targets, inputs cut once", [(11, 4), (7, 3), (4, 2)]),
    ("shorter targets, inputs cut often", [(20, 4), (7, 3), (13, 6), (25, 5)]),
):
    elements = elements_of(lengths)
    dataset = ConcatThenSplitIterDataset(
        grain.MapDataset.source(elements).to_iter_dataset(),
        length_struct={"inputs": 8, "targets": 8},
    )
    packed = list(itertools.islice(dataset, 100))
    print(f"{name}:")
    for key in ("inputs", "targets"):
        expected, tokens = tokens_in(elements, key), tokens_in(packed, key)
        repeated = sorted({token for token in tokens if tokens.count(token) > 1})
        print(f"    {len(expected)} {key}, of which {len(tokens)} are packed; repeated: {repeated}")
        if name.endswith("often") and key == "targets":
            is_as_described &= len(tokens) > len(expected) and set(tokens) == set(expected)
        else:
            is_as_described &= tokens == expected
sys.exit(0 if is_as_described else "each token is packed once")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
