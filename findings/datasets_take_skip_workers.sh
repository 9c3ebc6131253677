#!/usr/bin/env bash
# datasets 5.2.0: which examples take(n) and skip(n) of an IterableDataset of several shards mean
# depends on the number of workers of the DataLoader, or of nodes of split_dataset_by_node, that it
# is read with. Its documentation says the first n, and those after them, and offers both to split
# off validation data; but each worker takes or skips a part of n at the start of its own shards. If
# the two are read with other numbers of workers, some examples are in both and some in neither. No
# error, no warning, and the numbers of examples are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 datasets==5.2.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

# 4 shards, of the examples 0 to 9, 10 to 19, 20 to 29 and 30 to 39
examples = set(range(40))
dataset = Dataset.from_dict({"example": sorted(examples)}).to_iterable_dataset(num_shards=4)
validation = dataset.take(12)
training = dataset.skip(12)


def by_workers(split, workers):
    loader = DataLoader(split, batch_size=None, num_workers=workers)
    return {int(row["example"]) for row in loader}


def by_nodes(split, nodes):
    rows = [row for rank in range(nodes) for row in split_dataset_by_node(split, rank, nodes)]
    return {row["example"] for row in rows}


def compare(what, trained, validated):
    both, neither = sorted(trained & validated), sorted(examples - trained - validated)
    print(f"{what}: {len(trained)} to train, {len(validated)} to validate")
    print(f"    in both: {both}\n    in neither: {neither}")
    is_right_number = len(trained) == 28 and len(validated) == 12
    return is_right_number and bool(both) and bool(neither)


print("take(12) without workers:", sorted(by_workers(validation, 0)))
print("take(12) with 2 workers: ", sorted(by_workers(validation, 2)))
expected = by_workers(validation, 0)
is_as_described = expected == set(range(12)) and by_workers(validation, 2) != expected
is_as_described &= not compare("no workers", by_workers(training, 0), expected)
is_as_described &= not compare("2 workers", by_workers(training, 2), by_workers(validation, 2))
is_as_described &= compare("2 workers, and none", by_workers(training, 2), expected)
is_as_described &= compare("2 nodes, and one", by_nodes(training, 2), by_nodes(validation, 1))
sys.exit(0 if is_as_described else "take() and skip() no longer depend on the workers")
PROGRAM
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/program.py"
