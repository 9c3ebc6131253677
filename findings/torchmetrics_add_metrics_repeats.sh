#!/usr/bin/env bash
# torchmetrics 1.9.0: the metrics of a MetricCollection that have equal states share one. After
# add_metrics() between updates the collection makes its groups anew, for which each metric sees
# the next batch itself, but the state is still shared: the batch is added to it once for each. So
# with three metrics of a confusion matrix it counts three times in all of them. No error, no
# warning; with compute_groups=False, and without add_metrics(), all are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchmetrics==1.9.0
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassCohenKappa,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassMatthewsCorrCoef,
)

CLASSES, BATCHES, BATCH_SIZE, ADDED_AFTER = 4, 6, 16, 3
torch.manual_seed(0)
batches = [
    (torch.rand(BATCH_SIZE, CLASSES).softmax(-1), torch.randint(CLASSES, (BATCH_SIZE,)))
    for _ in range(BATCHES)
]


def new_metrics():
    return {
        "kappa": MulticlassCohenKappa(CLASSES),
        "matthews": MulticlassMatthewsCorrCoef(CLASSES),
        "matrix": MulticlassConfusionMatrix(CLASSES),
    }


def alone(chosen):
    """Return the values of the metrics outside of a collection, of these batches."""
    metrics = new_metrics()
    for metric in metrics.values():
        for batch in chosen:
            metric.update(*batch)
    return {name: metric.compute() for name, metric in metrics.items()}


def collected(add, **options):
    collection = MetricCollection(new_metrics(), **options)
    for number, batch in enumerate(batches):
        if add and number == ADDED_AFTER:
            collection.add_metrics({"f1": MulticlassF1Score(CLASSES)})
        collection.update(*batch)
    return collection.compute()


def show(title, values):
    samples = int(values["matrix"].sum())
    numbers = {name: round(values[name].item(), 4) for name in ("kappa", "matthews")}
    print(f"{title:22} {numbers}, matrix of {samples} samples")


expected = alone(batches)
repeated = alone(batches + 2 * [batches[ADDED_AFTER]])
show("alone", expected)
show(f"with batch {ADDED_AFTER} 3 times", repeated)
is_as_described = int(expected["matrix"].sum()) == BATCHES * BATCH_SIZE
is_as_described &= not torch.allclose(expected["kappa"], repeated["kappa"])
for title, values, oracle in (
    ("collection", collected(add=False), expected),
    ("f1 added, no groups", collected(add=True, compute_groups=False), expected),
    ("f1 added", collected(add=True), repeated),
):
    show(title, values)
    is_as_described &= all(torch.allclose(values[name], oracle[name]) for name in oracle)
sys.exit(0 if is_as_described else "add_metrics no longer makes a batch count several times")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
