#!/usr/bin/env bash
# pytorch-ignite 0.5.5: state_dict of a metric is to save its internal state, so that an epoch can
# go on from a checkpoint. That of CohenKappa is empty (of both its kinds), and that of
# MutualInformation lacks the entropies and the number of samples. load_state_dict takes them, and
# what was counted before is lost: kappa is that of the rest alone, and mutual information divides
# the probabilities of all samples by the number of the rest, by which it comes to be 0. No error,
# no warning; Accuracy, ConfusionMatrix, Entropy and most others go on as without a stop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 pytorch-ignite==0.5.5
cat > "$folder/program.py" <<'PROGRAM'
import io
import sys

import torch
from ignite.metrics import Accuracy, CohenKappa, ConfusionMatrix, Entropy, MutualInformation

torch.manual_seed(0)
samples, classes, done = 400, 4, 300
labels = torch.randint(classes, (samples,))
logits = torch.randn(samples, classes) + 2 * torch.nn.functional.one_hot(labels, classes)
logits[done:] = logits[done:].roll(1, dims=1)  # The rest is predicted worse.
predicted = logits.argmax(1)


def is_close(a, b):
    return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-4)


is_as_described = True
for name, make, outputs, loses in (
    ("Accuracy", Accuracy, logits, False),
    ("ConfusionMatrix", lambda: ConfusionMatrix(classes), logits, False),
    ("Entropy", Entropy, logits, False),
    ("CohenKappa", CohenKappa, predicted, True),
    ("CohenKappa of num_classes", lambda: CohenKappa(num_classes=classes), predicted, True),
    ("MutualInformation", MutualInformation, logits, True),
):
    first, rest = (outputs[:done], labels[:done]), (outputs[done:], labels[done:])
    metric = make()
    metric.update(first)
    file = io.BytesIO()
    torch.save(metric.state_dict(), file)
    metric.update(rest)
    whole = metric.compute()

    file.seek(0)
    resumed = make()
    resumed.load_state_dict(torch.load(file))
    resumed.update(rest)
    got = resumed.compute()

    alone = make()
    alone.update(rest)
    if name == "ConfusionMatrix":
        print(f"{name}: samples without a stop {whole.sum()}, resumed {got.sum()}")
    else:
        print(f"{name}: without a stop {whole:.4f}, resumed {got:.4f},", end=" ")
        print(f"of the rest alone {alone.compute():.4f}")
    is_as_described &= is_close(got, whole) != loses
    if "Kappa" in name:
        is_as_described &= is_close(got, alone.compute())
    if name == "MutualInformation":
        is_as_described &= whole > 0.4 and got == 0
sys.exit(0 if is_as_described else "states of these metrics are no longer incomplete")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
