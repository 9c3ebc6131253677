#!/usr/bin/env bash
# composer (mosaicml) 0.32.1: smooth_labels(), and the algorithm LabelSmoothing that calls it, turns
# ignored labels (-100) into rows of zeros, warns that it does, and then adds the smoothing to these
# rows too. soft_cross_entropy, which leaves rows of zeros out, takes them for tokens, so padding is
# trained towards the uniform distribution and counts in the mean. F.cross_entropy(...,
# label_smoothing=...) leaves ignored labels out; without any both agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.7.0 numpy==2.2.6 mosaicml==0.32.1
cat > "$folder/program.py" <<'PROGRAM'
import logging
import sys
import warnings

import torch
import torch.nn.functional as F

warnings.filterwarnings("ignore")
logging.disable()
from composer.functional import smooth_labels  # noqa: E402
from composer.loss import soft_cross_entropy  # noqa: E402

SMOOTHING = 0.1
torch.manual_seed(0)
labels = torch.randint(8, (2, 6))
padded = labels.clone()
padded[:, 3:] = -100


def by_composer(logits, labels):
    return soft_cross_entropy(logits, smooth_labels(logits, labels, SMOOTHING))


def by_torch(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)


is_as_described = True
for name, chosen in (("no label ignored", labels), ("half of them ignored", padded)):
    results = []
    for loss_of in (by_composer, by_torch):
        torch.manual_seed(1)
        logits = (3 * torch.randn(2, 8, 6)).requires_grad_()
        loss = loss_of(logits, chosen)
        loss.backward()
        of_ignored = logits.grad.movedim(1, -1)[chosen == -100].abs().sum().item()
        results.append((loss.item(), of_ignored))
        print(f"{name}, {loss_of.__name__}: loss {loss:.4f}, ", end="")
        print(f"gradients of ignored tokens sum up to {of_ignored:.4f}")
    (smoothed, to_ignored), (expected, expected_to_ignored) = results
    is_as_described &= expected_to_ignored == 0
    if chosen is labels:
        is_as_described &= abs(smoothed - expected) < 1e-5
    else:
        is_as_described &= abs(smoothed - expected) > 0.05 and to_ignored > 0.05
sys.exit(0 if is_as_described else "ignored labels are left out of smoothing now")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
