#!/usr/bin/env bash
# tinygrad 0.14.0: Tensor.sparse_categorical_crossentropy(labels, ignore_index=-1) ignores no label,
# for it takes -1, a usual value for ignored tokens, as "no ignore_index". The mean divides by the
# ignored tokens too, and with label smoothing each of them has a loss and a gradient. Its
# documentation refers to torch.nn.CrossEntropyLoss, where any value works. With -2 or -100 for the
# same tokens, and with nll_loss(ignore_index=-1), loss and gradients are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.3.5 tinygrad==0.14.0
cat > "$folder/program.py" <<'PROGRAM'
import sys
from importlib.metadata import version

import numpy as np
from tinygrad import Tensor

print("tinygrad", version("tinygrad"))
logits = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
labels = np.array([1, 2, -1, 0, -1, 4], np.int32)
kept = labels >= 0


def expected_loss(smoothing):
    """Return the mean loss of tokens that are not ignored, in fp64."""
    values = logits[kept].astype(np.float64)
    log_probs = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    of_label = log_probs[np.arange(len(values)), labels[kept]]
    return -((1 - smoothing) * of_label + smoothing * log_probs.mean(axis=1)).mean()


is_as_described = True
for ignored in (-1, -2, -100):
    renamed = Tensor(np.where(kept, labels, ignored).astype(np.int32))
    for smoothing in (0.0, 0.1):
        x = Tensor(logits.copy())
        loss = x.sparse_categorical_crossentropy(
            renamed, ignore_index=ignored, label_smoothing=smoothing
        )
        (gradient,) = loss.gradient(x)
        of_ignored = np.abs(gradient.numpy()[~kept]).max()
        expected = expected_loss(smoothing)
        print(f"ignore_index={ignored}, label_smoothing={smoothing}:", end=" ")
        print(f"loss {loss.item():.4f}, expected {expected:.4f},", end=" ")
        print(f"largest gradient of an ignored token {of_ignored:.2g}")
        is_right = abs(loss.item() - expected) < 1e-4
        is_as_described &= is_right == (ignored != -1)
        is_as_described &= (of_ignored > 1e-4) == (ignored == -1 and smoothing > 0)
    if ignored == -1:
        loss = Tensor(logits).log_softmax().nll_loss(renamed, ignore_index=-1).item()
        print(f"nll_loss(ignore_index=-1): {loss:.4f}, expected {expected_loss(0.0):.4f}")
        is_as_described &= abs(loss - expected_loss(0.0)) < 1e-4
sys.exit(0 if is_as_described else "ignore_index=-1 now behaves in another way")
PROGRAM
DEV=PYTHON "$folder/venv/bin/python" "$folder/program.py"
